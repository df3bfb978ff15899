// Makes recorded sessions the same on every machine and every run: the temporary root disappears from all paths, and what pi
// takes from the clock and from random numbers (times, durations, ids) is replaced by counters. Nothing else is touched.

import { createHash } from "node:crypto";

const FIRST_ENTRY = Date.parse("2026-03-02T09:00:00.000Z");
const ENTRY_MS = 4_000;
const DURATION_MS = 250;
const ENTRY_REFERENCES = ["id", "parentId", "firstKeptEntryId", "fromId", "targetId"];

const digest = (text) => createHash("sha256").update(text).digest("hex");

export class Scrubber {
  /** @param {[string, string][]} paths text to replace and its replacement, longest first */
  constructor(paths) {
    this.paths = paths;
    this.entries = new Map();
    this.sessions = new Map();
    this.files = new Map();
  }

  #text(text) {
    for (const [from, to] of this.paths) text = text.replaceAll(from, to);
    return text.replace(/(Ran \d+ tests? in )[\d.]+s/g, "$10.001s");
  }

  #deep(value) {
    if (typeof value === "string") return this.#text(value);
    if (Array.isArray(value)) return value.map((item) => this.#deep(item));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, this.#deep(item)]));
  }

  /** Entries that forks share keep one number, and with it one id and one time. */
  #number(table, id) {
    if (!table.has(id)) table.set(id, table.size);
    return table.get(id);
  }

  #time(entryId) {
    return FIRST_ENTRY + this.#number(this.entries, entryId) * ENTRY_MS;
  }

  #entryId(id) {
    return digest(`entry ${this.#number(this.entries, id)}`).slice(0, 8);
  }

  #sessionId(id, milliseconds) {
    const hex = digest(`session ${this.#number(this.sessions, id)}`);
    const time = milliseconds.toString(16).padStart(12, "0");
    return `${time.slice(0, 8)}-${time.slice(8)}-7${hex.slice(0, 3)}-a${hex.slice(3, 6)}-${hex.slice(6, 18)}`;
  }

  /**
   * Call in the order in which the sessions were made: a fork after its parent.
   * @returns {{name: string, text: string}} the new file name and content
   */
  session(oldName, jsonl) {
    const [header, ...entries] = jsonl.trimEnd().split("\n").map((line) => this.#deep(JSON.parse(line)));
    // A session starts with its own first entry: a fork's entries before that one belong to its parent.
    const first = entries.find((entry) => !this.entries.has(entry.id)) ?? entries[0];
    const started = this.#time(first.id) - ENTRY_MS / 2;
    header.id = this.#sessionId(header.id, started);
    header.timestamp = new Date(started).toISOString();
    if (header.parentSession) header.parentSession = header.parentSession.replace(/[^/]+$/, (name) => this.files.get(name));
    for (const entry of entries) this.#restamp(entry);

    const name = `${header.timestamp.replace(/[:.]/g, "-")}_${header.id}.jsonl`;
    this.files.set(oldName, name);
    return { name, text: [header, ...entries].map((entry) => `${JSON.stringify(entry)}\n`).join("") };
  }

  #restamp(entry) {
    const time = this.#time(entry.id);
    entry.timestamp = new Date(time).toISOString();
    for (const key of ENTRY_REFERENCES) {
      if (typeof entry[key] === "string" && entry[key] !== "root") entry[key] = this.#entryId(entry[key]);
    }
    for (const part of [entry.message, entry.systemMessage]) {
      if (part?.timestamp !== undefined) part.timestamp = time;
      if (part?.durationMs !== undefined) part.durationMs = DURATION_MS;
    }
  }
}
