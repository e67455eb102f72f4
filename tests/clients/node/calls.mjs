// Calls through the client of OpenAI for Node, and what came back as one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "What is a Kubernetes pod?" }];
const settings = { model: "demo-chat", max_tokens: 8, temperature: 0 };

const whole = await client.chat.completions.create({ ...settings, messages });
let streamed = "";
const usage = [];
const stream = await client.chat.completions.create({
  ...settings,
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) usage.push(chunk.usage.completion_tokens);
}
const text = await client.completions.create({ ...settings, prompt: "A pod is", logprobs: 1 });
let refused = "";
try {
  await client.chat.completions.create({ ...settings, messages, temperature: 9 });
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
  refused = error.message;
}
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    usage,
    text: text.choices[0].text,
    tokens: text.choices[0].logprobs.tokens,
    refused,
  }),
);
