// Calls one function of a program and writes its result as JSON. It runs in the program's own process.
// stdin: {"code": ..., "function": ..., "args": [...]}. What the program prints goes to stderr; stdout is the result's.
const { readFileSync, writeSync } = require("fs");

const request = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write = process.stderr.write.bind(process.stderr);

function find(name) {
  const body = `${request.code}
    ;if (typeof ${name} !== "undefined") return ${name};
    if (typeof Solution !== "undefined") { const it = new Solution(); return it.${name}.bind(it); }
    throw new ReferenceError("the program defines no function ${name}");`;
  return new Function("require", "module", "exports", body)(require, { exports: {} }, {});
}

const result = find(request.function)(...request.args);
writeSync(1, JSON.stringify(result === undefined ? null : result));
