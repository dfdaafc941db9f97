// Calls one function of a program and writes its result as JSON. It runs in the program's own process.
// stdin: {"code": ..., "function": ..., "args": [...]}. What the program prints goes to stderr; stdout is the result's.
const { readFileSync, writeSync } = require("fs");
const { inspect } = require("util");

const request = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write = process.stderr.write.bind(process.stderr);

function find(name) {
  const body = `${request.code}
    ;if (typeof ${name} !== "undefined") return ${name};
    if (typeof Solution !== "undefined") { const it = new Solution(); return it.${name}.bind(it); }
    throw new ReferenceError("the program defines no function ${name}");`;
  return new Function("require", "module", "exports", body)(require, { exports: {} }, {});
}

// A value as JSON, with NaN and the infinities as Python's json writes them. What it cannot say throws.
function json(value) {
  if (typeof value === "number" || typeof value === "bigint") return String(value);
  if (value === null || typeof value === "boolean" || typeof value === "string") return JSON.stringify(value);
  if (Array.isArray(value)) return `[${Array.from(value, (item) => json(item))}]`;
  if (typeof value === "object" && Object.prototype.toString.call(value) === "[object Object]")
    return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}:${json(item)}`)}}`;
  throw new TypeError("JSON cannot say it");
}

// A result as JSON; if JSON cannot say it, as JavaScript shows it, in <>, which equals no JSON.
function written(result) {
  try {
    return json(result);
  } catch {
    return `<${inspect(result)}>`;
  }
}

writeSync(1, written(find(request.function)(...request.args)));
