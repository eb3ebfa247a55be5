import { html } from "./ui.js";
export function Ledger() { return html`<h1>Ledger</h1>`; }
export function Ledgers() { return html`<h1>Ledgers</h1>`; }
