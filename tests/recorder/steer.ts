// pi extension for the tests: what a person does in pi's own screen, as commands.
export default function (pi: any) {
  let added = "";

  pi.on("before_agent_start", (event: any) => (added ? { systemPrompt: event.systemPrompt + added } : undefined));

  const command = (name: string, handler: (argument: string, context: any) => any) =>
    pi.registerCommand(name, { description: `Test: ${name}`, handler });

  command("add-to-prompt", (text) => { added = text && `\n\n${text}`; });
  command("only", (names) => pi.setActiveTools(names.split(",")));
  command("reread", (_, context) => context.reload());

  // `/goto TEXT [summarize]`: go on from the reply that says TEXT.
  command("goto", async (line, context) => {
    const [text, summarize] = line.split(" ");
    const says = ({ message }: any) => message?.role === "assistant" && message.content.some((block: any) => block.text === text);
    await context.navigateTree(context.sessionManager.getEntries().find(says).id, { summarize: summarize === "summarize" });
  });
}
