// pi extension: `/goto ENTRY [summarize]` does what selecting an entry in `/tree` does, so that a script can do it.
export default function (pi: any) {
  pi.registerCommand("goto", {
    description: "Continue from another entry of this session",
    handler: async (line: string, context: any) => {
      const [entry, summarize] = line.trim().split(/\s+/);
      await context.navigateTree(entry, { summarize: summarize === "summarize" });
    },
  });
}
