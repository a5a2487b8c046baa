// The Node side of peer_transformersjs.py: one JSON request per line on standard input, one JSON answer per line on
// standard output, logits after it as raw little-endian f32. The only argument is the folder that holds node_modules.
import { createRequire } from "node:module";
import { writeSync } from "node:fs";
import path from "node:path";
import readline from "node:readline";
import { makeMethods } from "./transformersjs_methods.mjs";

const require = createRequire(path.join(process.argv[2], "package.json"));
console.log = console.info = console.debug = console.warn = console.error; // standard output is for answers
const tjs = require("@huggingface/transformers");
const methods = makeMethods(tjs, "cpu");
methods.version = () => ({ version: tjs.env.version, node: process.version });

function send(bytes) {
  for (let at = 0; at < bytes.length; ) {
    try {
      at += writeSync(1, bytes, at);
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
    }
  }
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  let values;
  let answer;
  try {
    ({ values, ...answer } = await methods[request.method](request));
    if (values) answer.count = values.length;
  } catch (error) {
    answer = { error: String(error?.message ?? error) };
    values = undefined;
  }
  send(Buffer.from(JSON.stringify(answer) + "\n"));
  if (values) send(Buffer.from(values.buffer, values.byteOffset, values.byteLength));
}
