// The permissions of the logged-in user, from the grants of the token (docs/guides/tokens.md).

const ALL = ["read", "append", "manage"];

function covers(grant, kind, name) {
  const at = grant.indexOf(":");
  const where = grant.slice(at + 1);
  if (where === "*") return true;
  if (kind === "everything") return false;
  if (kind === "cluster") return where === "cluster";
  const [itsKind, itsName] = [where.slice(0, where.indexOf("/")), where.slice(where.indexOf("/") + 1)];
  if (itsKind !== kind) return false;
  return itsName.endsWith("*") ? name.startsWith(itsName.slice(0, -1)) : name === itsName;
}

/** Whether a caller (the response to `GET /v1/caller`) has one of `scopes`, separated by "|", on a resource.
 * `kind`: "logs", "ledgers" (with the namespace as `name`), "cluster" or "everything". */
export function may(caller, scopes, kind, name = "") {
  const wanted = scopes.split("|");
  return caller.grants.some((grant) => {
    const scope = grant.slice(0, grant.indexOf(":"));
    const has = scope === "admin" ? [...ALL, "admin"] : [scope];
    return covers(grant, kind, name) && wanted.some((one) => has.includes(one));
  });
}

/** Whether a caller has a grant on any resource of a kind, so that a list of this kind can have rows. */
export const mayOnAny = (caller, ...kinds) => caller.grants.some((grant) => {
  const where = grant.slice(grant.indexOf(":") + 1);
  return where === "*" || kinds.some((kind) => where.startsWith(`${kind}/`));
});

/** Whether a caller has one of `scopes` on a ledger's log, or on the namespace of a ledger without a log. */
export function mayOnLedger(caller, scopes, ledger) {
  return ledger.log
    ? may(caller, scopes, "logs", ledger.log)
    : may(caller, scopes, "ledgers", ledger.metadata?.namespace || "");
}
