// One pi process in RPC mode: send a command, await its answer, await the end of a run.

import { spawn } from "node:child_process";

const TIMEOUT_MS = 60_000;

export class Pi {
  constructor(command, args, options) {
    this.child = spawn(command, args, { ...options, stdio: ["pipe", "pipe", "pipe"] });
    this.exited = new Promise((done) => this.child.once("exit", done));
    this.stderr = "";
    this.waiting = new Set();
    this.sent = 0;
    this.child.stderr.on("data", (data) => (this.stderr += data));
    let rest = "";
    this.child.stdout.setEncoding("utf8").on("data", (data) => {
      const lines = (rest + data).split("\n");
      rest = lines.pop();
      for (const line of lines) this.#receive(JSON.parse(line));
    });
  }

  #receive(record) {
    for (const waiter of this.waiting) {
      if (!waiter.matches(record)) continue;
      this.waiting.delete(waiter);
      clearTimeout(waiter.timer);
      waiter.resolve(record);
    }
  }

  /** The next record that `matches`. Ask before the command that causes it. */
  next(matches, what) {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => reject(new Error(`pi sent no ${what}\n${this.stderr}`)), TIMEOUT_MS);
      this.waiting.add({ matches, resolve, timer });
    });
  }

  /** The data of the answer to one RPC command. */
  async call(type, fields = {}) {
    const id = `request-${++this.sent}`;
    const answer = this.next((record) => record.type === "response" && record.id === id, `answer to ${type}`);
    this.child.stdin.write(`${JSON.stringify({ id, type, ...fields })}\n`);
    const { success, error, data } = await answer;
    if (!success) throw new Error(`${type}: ${error}`);
    return data;
  }

  /** Prompt, and wait until the run with all its retries is over. */
  async prompt(message) {
    const settled = this.next((record) => record.type === "agent_settled", "agent_settled");
    await Promise.all([this.call("prompt", { message }), settled]);
  }

  /** Prompt, and abort as soon as the streamed answer holds `text`. */
  async promptAndAbort(message, text) {
    const settled = this.next((record) => record.type === "agent_settled", "agent_settled");
    let heard = "";
    const streamed = this.next(({ assistantMessageEvent: event }) => {
      if (event?.type === "text_delta") heard += event.delta;
      return heard.includes(text);
    }, "streamed text");
    await Promise.all([this.call("prompt", { message }), streamed.then(() => this.call("abort")), settled]);
  }

  async leaf() {
    return (await this.call("get_entries")).leafId;
  }

  async close() {
    this.child.stdin.end();
    await this.exited;
  }
}
