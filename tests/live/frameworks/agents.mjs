// OpenAI's agents for JavaScript on the Responses API, as an application uses them.
//
// Its arguments are the server's base URL and the model, which calls the tool "lamp" once in each
// run, and answers then.
import { Agent, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import assert from "node:assert/strict";
import OpenAI from "openai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
setTracingDisabled(true);
const lamp = tool({
  name: "lamp",
  description: "a lamp",
  parameters: z.object({ on: z.boolean() }),
  execute: async () => "it is on",
});
const agent = new Agent({
  name: "keeper",
  instructions: "be brief",
  tools: [lamp],
  model: new OpenAIResponsesModel(new OpenAI({ baseURL, apiKey: "one" }), name),
});
const kinds = (result) => result.newItems.map((item) => item.type);
const LOOP = ["tool_call_item", "tool_call_output_item", "message_output_item"];

const first = await run(agent, "on");
assert.deepEqual(kinds(first), LOOP);
const streamed = await run(agent, "on", { stream: true });
for await (const event of streamed) assert.ok(event.type);
await streamed.completed;
assert.deepEqual(kinds(streamed), LOOP);
const again = await run(agent, [...first.history, { role: "user", content: "again" }]);
assert.deepEqual(kinds(again), LOOP);
const after = await run(agent, "more", { previousResponseId: again.lastResponseId });
assert.deepEqual(kinds(after), LOOP);
