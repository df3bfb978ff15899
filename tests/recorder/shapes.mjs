// Prints what the recorder makes of the request that pi builds for each of its APIs, without sending one.
//
//   node shapes.mjs PI_FOLDER RECORDER.ts

import { existsSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, recorder] = process.argv.slice(2).map((path) => resolve(path));
const load = (path) => import(pathToFileURL(path));

const library = join(folder, "node_modules/@earendil-works/pi-ai/dist");
const { streamSimple } = await load([join(library, "compat.js"), join(library, "index.js")].find(existsSync));
const { default: install } = await load(recorder);

const APIS = {
  "openai-completions": "openai",
  "openai-responses": "openai",
  "openai-codex-responses": "openai-codex",
  "azure-openai-responses": "azure-openai-responses",
  "anthropic-messages": "anthropic",
  "google-generative-ai": "google",
  "bedrock-converse-stream": "amazon-bedrock",
  "mistral-conversations": "mistral",
};
const account = Buffer.from(JSON.stringify({ "https://api.openai.com/auth": { chatgpt_account_id: "nobody" } })).toString("base64");
const tool = { name: "look", description: "Look at it.", parameters: { type: "object", properties: { at: { type: "string" } }, required: ["at"] } };
const conversation = { systemPrompt: "Be brief.", tools: [tool], messages: [{ role: "user", content: "Hello", timestamp: 0 }] };

/** The body pi would send; the request ends before it is sent. */
async function payloadOf(api) {
  const model = { id: "some-model", name: "Some", api, provider: APIS[api], baseUrl: "http://127.0.0.1:9/v1", reasoning: false, input: ["text"],
    cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 }, contextWindow: 1000, maxTokens: 100 };
  let payload;
  const onPayload = (body) => {
    payload = body;
    throw new Error("not sent");
  };
  const end = await streamSimple(model, conversation, { apiKey: `x.${account}.x`, onPayload, maxRetries: 0 }).result();
  if (!payload) throw new Error(`${api}: ${end.errorMessage}`);
  return payload;
}

/** What the recorder does with some payloads of one session: the entries it appends, and what it says. */
function recorded(...payloads) {
  const entries = [];
  const warnings = [];
  let handler;
  install({ on: (_, given) => (handler = given), appendEntry: (customType, data) => entries.push({ type: "custom", customType, data, parentId: null }) });
  const context = { hasUI: true, ui: { notify: (text) => warnings.push(text) }, sessionManager: { getLeafEntry: () => entries.at(-1), getEntry: () => undefined } };
  const returned = payloads.map((payload) => handler({ type: "before_provider_request", payload }, context));
  return { entries, warnings, untouched: returned.every((value) => value === undefined) };
}

const results = {};
for (const api of Object.keys(APIS)) {
  const payload = await payloadOf(api);
  const before = JSON.stringify(payload);
  results[api] = recorded(payload, payload);
  results[api].untouched &&= JSON.stringify(payload) === before;
}
const chat = await payloadOf("openai-completions");
results.unknown = recorded({ prompt: "what is this" }, null, undefined, { messages: "none" }, { messages: [null] });
results.system_only = recorded({ ...chat, messages: chat.messages.slice(0, 1), tools: [] });
results.changed = recorded(chat, { ...chat, tools: [] }, chat);
console.log(JSON.stringify(results));
