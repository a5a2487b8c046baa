// A decoder in transformers.js behind the calls of the Python peers: what Node (peer_transformersjs.mjs) and a page share.
// `run` gives its logits as `values`, a Float32Array; everything else a method returns is JSON.

export function makeMethods(tjs, device) {
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

  return {
    version: () => ({ version: tjs.env.version }),
    async load(request) {
      await model?.dispose();
      model = tokenizer = null;
      clear();
      folder = request.folder;
      const options = { dtype: request.dtype, device };
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
}
