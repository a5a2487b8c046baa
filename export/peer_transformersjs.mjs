// The Node side of peer_transformersjs.py: one JSON request per line on standard input, one JSON answer per line on
// standard output, logits after it as raw little-endian f32. The only argument is the folder that holds node_modules.
import { createRequire } from "node:module";
import { writeSync } from "node:fs";
import path from "node:path";
import readline from "node:readline";

const require = createRequire(path.join(process.argv[2], "package.json"));
console.log = console.info = console.debug = console.warn = console.error; // standard output is for answers
const tjs = require("@huggingface/transformers");
tjs.env.allowRemoteModels = false;
tjs.env.allowLocalModels = true;

let folder = null;
let model = null;
let tokenizer = null;
let past = null;
let position = 0;

function clear() {
  past = null;
  position = 0;
  return {};
}

const methods = {
  version: () => ({ version: tjs.env.version, node: process.version }),
  async load(request) {
    await model?.dispose();
    model = tokenizer = null;
    clear();
    folder = request.folder;
    const options = { dtype: request.dtype, device: "cpu" };
    if (request.model_file_name) options.model_file_name = request.model_file_name;
    options.session_options = { intraOpNumThreads: request.threads, interOpNumThreads: 1 };
    model = await tjs.AutoModelForCausalLM.from_pretrained(folder, options);
    return {};
  },
  async unload() {
    await model?.dispose();
    model = null;
    return clear();
  },
  clear,
  async tokenize({ texts }) {
    tokenizer ??= await tjs.AutoTokenizer.from_pretrained(folder);
    return { ids: texts.map((text) => tokenizer.encode(text)) };
  },
  async run({ ids }) {
    position += ids.length;
    const row = (values) => new tjs.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
    const out = await model({
      input_ids: row(ids),
      attention_mask: row(Array(position).fill(1)),
      past_key_values: past,
    });
    const kept = Object.entries(out).filter(([name]) => name.startsWith("present."));
    past = new tjs.DynamicCache(Object.fromEntries(kept.map(([name, value]) => [name.replace("present", "past_key_values"), value])));
    return { values: out.logits.data };
  },
};

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
