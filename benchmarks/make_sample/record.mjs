// Records the bundled sample sessions with a real pi on a toy repository, driven by scripted prompts and model replies.
//
//   npm install --prefix DIR node@24 @earendil-works/pi-coding-agent@1.6.0
//   DIR/node_modules/.bin/node benchmarks/make_sample/record.mjs --pi DIR [--out dagpack_hf/sample/sessions] [--check]
//
// --check compares with the files that are there instead of replacing them. Takes ten seconds; needs no network.

import { cpSync, existsSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, realpathSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import { ScriptedModel } from "./model.mjs";
import { Pi } from "./pi.mjs";
import { scenarios } from "./scenarios.mjs";
import { Scrubber } from "./scrub.mjs";

const HERE = dirname(fileURLToPath(import.meta.url));
const PACKAGE = "node_modules/@earendil-works/pi-coding-agent";
const PI_VERSION = "1.6.0";

const { values: options } = parseArgs({
  options: {
    pi: { type: "string" },
    out: { type: "string", default: join(HERE, "../../dagpack_hf/sample/sessions") },
    check: { type: "boolean", default: false },
  },
});
if (!options.pi) throw new Error("--pi DIR is missing: the folder that holds pi's node_modules");
const piPackage = join(resolve(options.pi), PACKAGE);
const { version } = JSON.parse(readFileSync(join(piPackage, "package.json"), "utf8"));
if (version !== PI_VERSION) throw new Error(`${piPackage} is pi ${version}: the sample is recorded with ${PI_VERSION}`);

const root = realpathSync(mkdtempSync(join(tmpdir(), "record-")));
const home = join(root, "home/user");
const agent = join(home, ".pi/agent");
const project = join(home, "projects/ledger");
const sessionDir = join(agent, "sessions");
const environment = {
  PATH: "/usr/bin:/bin",
  HOME: home,
  LANG: "C.UTF-8",
  TERM: "dumb",
  PYTHONDONTWRITEBYTECODE: "1",
  PI_CODING_AGENT_DIR: agent,
  PI_OFFLINE: "1",
  PI_TELEMETRY: "0",
};

function keepProject(snapshot) {
  cpSync(project, join(root, "kept", snapshot), { recursive: true });
}

/** Puts the toy repository back to a snapshot, or to what it was at first. */
function restoreProject(snapshot) {
  rmSync(project, { recursive: true, force: true });
  cpSync(snapshot ? join(root, "kept", snapshot) : join(HERE, "ledger"), project, { recursive: true, filter: (path) => !path.endsWith("__pycache__") });
}

function configure(baseUrl, keepRecentTokens) {
  const model = { id: "scripted-coder", reasoning: true, contextWindow: 128000, maxTokens: 8192, cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 } };
  const provider = { baseUrl, api: "openai-completions", apiKey: "none", models: [model] };
  mkdirSync(agent, { recursive: true });
  writeFileSync(join(agent, "models.json"), JSON.stringify({ providers: { local: provider } }));
  writeFileSync(join(agent, "settings.json"), JSON.stringify({ retry: { baseDelayMs: 1 }, compaction: { keepRecentTokens } }));
}

async function takeStep(step, pi, model, marks) {
  model.queue.push(...(step.replies ?? []));
  switch (step.do) {
    case "prompt": await pi.prompt(step.text); break;
    case "abort": await pi.promptAndAbort(step.text, step.replies[0].text); break;
    case "bash": await pi.call("bash", { command: step.command }); break;
    case "compact": await pi.call("compact"); break;
    case "mark": marks.set(step.name, await pi.leaf()); keepProject(`${model.name}.${step.name}`); break;
    case "goto": await pi.call("prompt", { message: `/goto ${marks.get(step.name)}${step.replies ? " summarize" : ""}` }); break;
    case "restore": restoreProject(`${model.name}.${step.name}`); break;
    default: throw new Error(`unknown step ${step.do}`);
  }
  if (model.unexpected.length) throw new Error(`a request more than scripted in ${JSON.stringify(step)}: ${model.unexpected[0]}`);
  if (model.queue.length) throw new Error(`${model.queue.length} replies left over after ${JSON.stringify(step)}`);
}

/** Runs one scenario and returns the name of the session file that pi wrote. */
async function record(scenario, files) {
  const model = new ScriptedModel(scenario.name);
  configure(await model.start(), scenario.keepRecentTokens ?? 20000);
  restoreProject(scenario.fork ?? scenario.resume);
  const start = scenario.fork ? ["--fork", files.get(scenario.fork)] : scenario.resume ? ["--session", files.get(scenario.resume)] : [];
  const title = scenario.title ? ["--name", scenario.title] : [];
  const pi = new Pi(process.execPath, [join(piPackage, "dist/cli.js"), "--mode", "rpc", "--model", "local/scripted-coder", "--session-dir", sessionDir,
    "--no-extensions", "--extension", join(HERE, "goto.ts"), "--no-skills", "--no-mcp", ...start, ...title], { cwd: project, env: environment });
  try {
    const marks = new Map();
    for (const step of scenario.steps) await takeStep(step, pi, model, marks);
    keepProject(scenario.name);
    return (await pi.call("get_state")).sessionFile;
  } finally {
    await pi.close();
    model.stop();
  }
}

try {
  const files = new Map();
  for (const scenario of scenarios) {
    process.stderr.write(`${scenario.name}\n`);
    files.set(scenario.name, await record(scenario, files));
  }
  const scrubber = new Scrubber([[piPackage, `/home/user/.npm/lib/${PACKAGE}`], [root, ""]]);
  const made = [...new Set(files.values())].map((path) => scrubber.session(path.split("/").at(-1), readFileSync(path, "utf8")));
  if (options.check) {
    const differs = made.filter(({ name, text }) => !existsSync(join(options.out, name)) || readFileSync(join(options.out, name), "utf8") !== text);
    for (const { name } of differs) console.log(`differs: ${name}`);
    process.exitCode = differs.length ? 1 : 0;
  } else {
    mkdirSync(options.out, { recursive: true });
    for (const name of readdirSync(options.out)) if (name.endsWith(".jsonl")) rmSync(join(options.out, name));
    for (const { name, text } of made) writeFileSync(join(options.out, name), text);
    console.log(`${made.length} sessions in ${options.out}`);
  }
} finally {
  rmSync(root, { recursive: true });
}
