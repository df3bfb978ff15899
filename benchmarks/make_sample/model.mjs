// A model that says what it is told to: an OpenAI-compatible server on 127.0.0.1 that answers the requests of one pi process
// from a queue, first in, first out. A request without a reply in the queue is an error of the script, and is refused.
//
// A reply is {think?, text?, calls?: [{name, args}], fail?: HTTP status, hang?: true}. `hang` streams think and text and then
// says nothing more, until the client goes away.

import http from "node:http";

const PIECE = /[\s\S]{1,60}/gu;

export class ScriptedModel {
  /** @param {string} name prefix of response and call ids */
  constructor(name) {
    this.name = name;
    this.queue = [];
    this.count = 0;
    this.unexpected = [];
  }

  async start() {
    this.server = http.createServer((request, response) => this.#answer(request, response));
    await new Promise((ready) => this.server.listen(0, "127.0.0.1", ready));
    return `http://127.0.0.1:${this.server.address().port}/v1`;
  }

  stop() {
    this.server.closeAllConnections();
    this.server.close();
  }

  async #answer(request, response) {
    let body = "";
    for await (const chunk of request) body += chunk;
    const reply = this.queue.shift();
    if (!reply) {
      this.unexpected.push(body.slice(-400));
      return refuse(response, 400, "no reply is scripted for this request");
    }
    if (reply.fail) return refuse(response, reply.fail, "the model is overloaded, try again");

    const id = `chatcmpl-${this.name}-${String(++this.count).padStart(3, "0")}`;
    const send = (fields) => response.write(`data: ${JSON.stringify({ id, object: "chat.completion.chunk", created: 0, model: "scripted-coder", ...fields })}\n\n`);
    const delta = (piece, finish_reason = null) => send({ choices: [{ index: 0, delta: piece, finish_reason }] });

    response.writeHead(200, { "content-type": "text/event-stream" });
    delta({ role: "assistant", content: "" });
    for (const piece of reply.think?.match(PIECE) ?? []) delta({ reasoning_content: piece });
    for (const piece of reply.text?.match(PIECE) ?? []) delta({ content: piece });
    if (reply.hang) return;
    for (const [index, call] of (reply.calls ?? []).entries()) {
      delta({ tool_calls: [{ index, id: `call_${this.name}_${this.count}_${index}`, type: "function", function: { name: call.name, arguments: "" } }] });
      for (const piece of JSON.stringify(call.args).match(PIECE)) delta({ tool_calls: [{ index, function: { arguments: piece } }] });
    }
    delta({}, reply.calls?.length ? "tool_calls" : "stop");
    send({ choices: [], usage: { prompt_tokens: 0, completion_tokens: 0, total_tokens: 0 } });
    response.end("data: [DONE]\n\n");
  }
}

function refuse(response, status, message) {
  response.writeHead(status, { "content-type": "application/json" });
  response.end(JSON.stringify({ error: { message, type: "server_error" } }));
}
