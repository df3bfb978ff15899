// dagpack-recorder: a pi extension, put in place by `dagpack record --install`.
//
// Keeps in the session file what pi does not: the system prompt and the tools of each request, as they are sent. Before a turn
// it appends an entry `dagpack.request`, unless the nearest one above it on the current branch says the same. So the nearest
// entry above a reply holds what the model of that reply was told, also after moving in the tree, forking or resuming.
//
// The entries are no part of any context, requests stay as they are, and nothing is sent anywhere. Works in pi 0.74 and later.
// Requests for summaries (compaction, branches) do not raise the event.

import { createHash } from "node:crypto";
import type { ExtensionAPI, ExtensionContext } from "@earendil-works/pi-coding-agent";

const ENTRY_TYPE = "dagpack.request";
const VERSION = 1;

export default function (pi: ExtensionAPI) {
  let warned = false;
  pi.on("before_provider_request", (event, context) => {
    try {
      record(pi, event.payload, context);
    } catch (error) {
      if (!warned) warn(`System prompt and tools are not recorded: ${error}`, context);
      warned = true;
    }
  });
}

function record(pi: ExtensionAPI, payload: any, context: ExtensionContext) {
  const prompt = JSON.stringify({ system: systemMessages(payload), tools: toolSchemas(payload) });
  const sha256 = createHash("sha256").update(prompt).digest("hex");
  if (lastRecord(context)?.sha256 === sha256) return;
  pi.appendEntry(ENTRY_TYPE, { version: VERSION, sha256, model: payload.model ?? payload.modelId, ...JSON.parse(prompt) });
}

/** The nearest record above the point where the session goes on, unless pi has recorded a prompt of its own since (0.86 and later). */
function lastRecord({ sessionManager }: ExtensionContext): any {
  let entry: any = sessionManager.getLeafEntry();
  while (entry) {
    if (entry.type === "custom" && entry.customType === ENTRY_TYPE) return entry.data;
    if (entry.message?.role === "system" || entry.systemMessage) return undefined;
    entry = entry.parentId ? sessionManager.getEntry(entry.parentId) : undefined;
  }
}

/**
 * The system and developer messages that a request begins with. Later ones are part of the conversation.
 * Chat completions and Mistral have them in `messages`, Responses in `input` or `instructions`, Anthropic and Bedrock in `system`,
 * Google in `config`.
 */
function systemMessages(payload: any): any[] {
  const prompts = [payload.instructions, payload.system, payload.config?.systemInstruction];
  return [...prompts.map((content) => ({ role: "system", content })), ...leadingItems(payload)]
    .map(({ role, content }) => ({ role, content: contentText(content) }))
    .filter(({ content }) => content?.length);
}

function leadingItems(payload: any): any[] {
  const items = payload.messages ?? payload.input ?? payload.contents;
  if (!Array.isArray(items)) throw new Error("the request has an unknown form");
  const end = items.findIndex((item) => item.role !== "system" && item.role !== "developer");
  return end < 0 ? items : items.slice(0, end);
}

/** Text as it is, parts without what providers add to them (cache marks, names of their own for text). */
function contentText(content: any): any {
  if (!Array.isArray(content)) return content;
  return content.filter((part) => typeof part.text === "string").map(({ text }) => ({ type: "text", text }));
}

/** The tools as function schemas, whatever the API calls their parts; without those that wait until the model asks for them. */
function toolSchemas(payload: any): any[] {
  const lists = [payload.tools, payload.config?.tools, payload.toolConfig?.tools, ...leadingItems(payload).map((item) => item.tools)];
  return lists
    .flatMap((tools) => tools ?? [])
    .flatMap((tool) => tool.functionDeclarations ?? [tool])
    .filter((tool) => !tool.defer_loading)
    .map((tool) => tool.function ?? tool.custom ?? tool.toolSpec ?? tool)
    .filter((tool) => typeof tool.name === "string")
    .map((tool) => ({ type: "function", function: { name: tool.name, description: tool.description, parameters: parameters(tool) } }));
}

function parameters(tool: any): any {
  return tool.parameters ?? tool.parametersJsonSchema ?? tool.input_schema ?? tool.inputSchema?.json;
}

function warn(text: string, context: ExtensionContext) {
  try {
    if (context.hasUI) context.ui.notify(`dagpack-recorder: ${text}`, "warning");
    else console.error(`dagpack-recorder: ${text}`);
  } catch {
    // Nobody is there to be told.
  }
}
