import { html } from "./ui.js";
export function Repair() { return html`<h1>Repair</h1>`; }
