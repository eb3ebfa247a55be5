import { html } from "./ui.js";
export function Log() { return html`<h1>Log</h1>`; }
export function Logs() { return html`<h1>Logs</h1>`; }
