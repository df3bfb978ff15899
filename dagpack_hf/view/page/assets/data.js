// The data of the page, and what follows from them.

const data = JSON.parse(document.getElementById("data").textContent);
const { figures, files, entries, nodes, blocks, windows, windowSets, fileSets } = data;

for (const entry of entries) {
  entry.label ??= "";
  entry.caption ??= "";
  entry.status ??= "";
  entry.blocks ??= [];
  entry.tokens ??= 0;
  entry.targets ??= 0;
  entry.position ??= -1;
  entry.parts ??= [];
  entry.details ??= [];
  entry.children = [];
}
entries.forEach((entry, number) => {
  if (entry.parent >= 0) entries[entry.parent].children.push(number);
});
for (const file of files) {
  file.title ??= "";
  file.tokens ??= 0;
  file.shared ??= 0;
}

const blockCount = blocks.node.length;
const nodeCount = nodes.parent.length;
const laneCount = nodes.parent.reduce((most, _, node) => Math.max(most, nodes.top[node] + nodes.lanes[node]), 1);
const longest = nodes.depth.reduce((most, depth, node) => Math.max(most, depth + nodes.length[node]), 1);

// First block of each node, and one past the last of the last node; blocks are in the order of nodes.
const firstBlock = new Int32Array(nodeCount + 1).fill(blockCount);
for (let block = blockCount - 1; block >= 0; block--) firstBlock[blocks.node[block]] = block;

const blocksOfFile = files.map(() => []);
const blocksOfWindow = windows.map(() => []);
for (let block = 0; block < blockCount; block++) {
  for (const file of fileSets[blocks.files[block]]) blocksOfFile[file].push(block);
  for (const window of windowSets[blocks.windows[block]]) blocksOfWindow[window].push(block);
}

const blocksOfEntry = (entry) => {
  const found = [];
  for (const [low, high] of entries[entry].blocks) for (let block = low; block < high; block++) found.push(block);
  return found;
};
