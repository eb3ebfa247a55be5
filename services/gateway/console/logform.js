// A log's settings: their units, explanations and inputs. Also checks of log names.

import { Problem } from "./api.js";
import { Choice, Field, Fragment, bytes, count, duration, html, useState } from "./ui.js";

const UNITS = {
  bytes: { "": 1, b: 1, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40 },
  seconds: { "": 1, s: 1, min: 60, h: 3600, d: 86400 },
  count: { "": 1 },
};
const SHOWN = { bytes: ["TiB", "GiB", "MiB", "KiB"], seconds: ["d", "h", "min"], count: [] };
const SHOW = { bytes, seconds: duration, count };

/** The settings of a log that can change. A setting has a unit, or `options` for a choice. `zero`: what 0 means. */
export const LIMITS = [
  { name: "roll_bytes", title: "New ledger after bytes", unit: "bytes",
    help: "At this size the log closes its open ledger and continues in a new one. Space is freed by whole ledgers, so smaller ledgers free it sooner." },
  { name: "roll_entries", title: "New ledger after append requests", unit: "count", help: "0: no limit." },
  { name: "roll_seconds", title: "New ledger after time", unit: "seconds", help: "The age of an open ledger, such as 12 h. 0: no limit." },
  { name: "retention_bytes", title: "Keep at least bytes", unit: "bytes",
    help: "The log keeps at least this many of its newest bytes and drops older ledgers for good. 0: no limit." },
  { name: "retention_seconds", title: "Keep for", unit: "seconds",
    help: "The log drops a closed ledger for good after this time, such as 7 d. 0: no limit." },
  { name: "merge_below_bytes", title: "Merge ledgers below bytes", unit: "bytes",
    help: "Closed ledgers below this size are merged into larger ones in the background. 0: never." },
  { name: "cleanup_policy", title: "Cleanup", options: [
    ["delete", "delete: old records go, by the limits above"],
    ["compact", "compact: the newest record of each key stays"],
    ["compact,delete", "compact and delete: both"],
  ] },
  { name: "min_compaction_lag_s", title: "Compact closed ledgers after time", unit: "seconds", zero: "at once",
    help: "A closed ledger is not compacted until this time after its close." },
  { name: "delete_retention_s", title: "Keep tombstones for", unit: "seconds", zero: "no time",
    help: "Compaction keeps a tombstone at least for this time, so that readers learn of the deletion." },
  { name: "max_dirty_percent", title: "Compact at percent of new bytes", unit: "count", zero: "0",
    help: "Compaction begins when this share of the bytes in closed ledgers was not compacted yet, 0 to 100." },
];

/** Raise a Problem that a dialog shows. */
export function refuse(detail, title = "The form is not complete") {
  throw new Problem(0, { title, detail });
}

/** A limit's text, such as "256 MiB", as a number, or the chosen option. */
export function parsed(limit, text) {
  if (limit.options) return text;
  const found = /^(\d+)\s*([a-z]*)$/i.exec(text.trim() || "0");
  const size = found && UNITS[limit.unit][found[2].toLowerCase()];
  const value = size && Number(found[1]) * size;
  if (value === undefined || value === null || !Number.isSafeInteger(value)) {
    const units = SHOWN[limit.unit].join(", ");
    refuse(`“${limit.title}” must be a whole number${units && `, with or without a unit (${units})`}.`);
  }
  return value;
}

/** The exact text of a limit, in the largest unit that divides it. */
export function written(limit, value) {
  const unit = value && !limit.options && SHOWN[limit.unit].find((name) => value % UNITS[limit.unit][name.toLowerCase()] === 0);
  return unit ? `${value / UNITS[limit.unit][unit.toLowerCase()]} ${unit}` : String(value);
}

/** Format a setting for display. */
export const limited = (limit, value) =>
  (limit.options ? value : value ? SHOW[limit.unit](value) : limit.zero ?? "no limit");

/** How long a log keeps its records, in words. */
export function retention({ retention_bytes: size, retention_seconds: seconds, cleanup_policy: policy }) {
  if (policy === "compact") return "newest of each key";
  return [seconds && duration(seconds), size && `newest ${bytes(size)}`].filter(Boolean).join(", ") || "for ever";
}

/** Whether a text can be a log's name, or the beginning of one. */
export const isName = (text) => /^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$/.test(text);

/** The state of a form in a dialog, which is `initial` each time the dialog opens. `kept`: a ref in which the dialog's
 * act finds the state. Returns the state, and a function that changes some of its members. */
export function useForm(kept, initial) {
  const [form, setForm] = useState(initial);
  kept.current = form;
  return [form, (more) => setForm((old) => ({ ...old, ...more }))];
}

/** The state of LimitFields for a log, or for the defaults. */
export const limitTexts = (settings, isProtected) =>
  ({ ...Object.fromEntries(LIMITS.map((one) => [one.name, written(one, settings[one.name])])), isProtected });

/** The settings in the state of LimitFields. */
export const limitsOf = (form) =>
  ({ ...Object.fromEntries(LIMITS.map((one) => [one.name, parsed(one, form[one.name])])), deletion_protection: form.isProtected });

/** The inputs for all limits and the deletion protection. */
export function LimitFields({ form, change }) {
  return html`<${Fragment}>
    ${LIMITS.map((one) => (one.options
      ? html`<${Choice} label=${one.title} options=${one.options} value=${form[one.name]} set=${(value) => change({ [one.name]: value })} />`
      : html`<${Field} label=${one.title} help=${one.help} value=${form[one.name]} set=${(text) => change({ [one.name]: text })} />`))}
    <label class="check"><input type="checkbox" checked=${form.isProtected} onChange=${(event) => change({ isProtected: event.target.checked })} />
      Deletion protection <small>While it is on, the log can't be deleted, truncated or overwritten. Retention continues.</small></label>
  <//>`;
}

/** The offset in the state of PlaceFields, in the form that the API accepts: "earliest", "-50", an offset or a time. */
export function placeOf({ place, offset, time }) {
  if (place === "offset" && !/^-?\d{1,15}$/.test(offset.trim())) refuse("An offset is a whole number, such as 1000. -10 means ten before the end.");
  if (place === "time" && !time) refuse("Choose a time.");
  return place === "offset" ? offset.trim() : place === "time" ? new Date(time).toISOString() : place;
}

/** The inputs for an offset of a log. `options`: the choices; "offset" and "time" have an additional input. */
export function PlaceFields({ label, form, change, options }) {
  return html`<${Fragment}>
    <${Choice} label=${label} value=${form.place} set=${(place) => change({ place })} options=${[...options, ["offset", "An offset"], ["time", "A time"]]} />
    ${form.place === "offset" && html`<${Field} label="Offset" value=${form.offset} set=${(offset) => change({ offset })} inputMode="numeric" required pattern="\\s*-?[0-9]{1,15}\\s*" title="A whole number. -10 means ten before the end." />`}
    ${form.place === "time" && html`<${Field} label="Time, in your time zone" type="datetime-local" step="1" value=${form.time} set=${(time) => change({ time })} required />`}
  <//>`;
}

/** Lines "name<separator>value" as an object. */
export function pairs(text, separator, what) {
  const found = {};
  for (const line of text.split("\n").filter((one) => one.trim())) {
    const at = line.indexOf(separator);
    if (at < 1) refuse(`Write each ${what} on a line of its own, as name${separator} value.`);
    const name = line.slice(0, at).trim();
    if (Object.hasOwn(found, name)) refuse(`The ${what} “${name}” appears twice.`);
    Object.defineProperty(found, name, { value: line.slice(at + 1).trim(), enumerable: true });
  }
  return found;
}
