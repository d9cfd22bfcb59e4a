// The AI SDK on the Responses API, as an application uses it; fails where anything does.
//
// Its arguments are the server's base URL and the model. The model calls the tool "lamp" twice in
// the loop of tools, and answers otherwise.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const sent = [];
const spy = (url, options) => {
  sent.push(options.body);
  return fetch(url, options);
};
const model = createOpenAI({ baseURL, apiKey: "one", fetch: spy }).responses(name);
const ask = (options) => generateText({ model, maxOutputTokens: 500, ...options });
const openai = (options) => ({ providerOptions: { openai: options } });

const lamp = tool({
  description: "a lamp",
  inputSchema: z.object({ on: z.boolean() }),
  execute: async () => "it is on",
});
const loop = await ask({ prompt: "on", tools: { lamp }, stopWhen: stepCountIs(4) });
assert.deepEqual(loop.steps.map((step) => step.toolCalls.length), [1, 1, 0]);

const first = await ask({ prompt: "hello" });
assert.ok(first.text);
// Items of earlier turns become references to what is stored.
const messages = [
  { role: "user", content: "hello" },
  ...first.response.messages,
  { role: "user", content: "and then?" },
];
const second = await ask({ messages });
assert.match(sent.at(-1), /item_reference/);
await ask({ prompt: "more", ...openai({ previousResponseId: second.response.id }) });

const created = await fetch(`${baseURL}/conversations`, {
  method: "POST",
  headers: { "content-type": "application/json", authorization: "Bearer one" },
  body: "{}",
});
const conversation = (await created.json()).id;
for (const prompt of ["hello", "more"]) await ask({ prompt, ...openai({ conversation }) });

const hints = { store: false, include: ["reasoning.encrypted_content"], textVerbosity: "low" };
await ask({ prompt: "hello", ...openai({ ...hints, promptCacheRetention: "24h" }) });

const stream = streamText({ model, prompt: "hello", maxOutputTokens: 500 });
let text = "";
for await (const part of stream.textStream) text += part;
assert.ok(text);
assert.equal(await stream.finishReason, "stop");

const schema = z.object({ on: z.boolean() });
const made = await generateObject({ model, schema, prompt: "on", maxOutputTokens: 500 });
assert.equal(made.object.on, true);
