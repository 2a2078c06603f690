// One answer: the request to the API, and the stream that it returns.

import { ApiError, postJson, serverEvents } from "../base.js";
import { messagesFor, promptFor } from "./conversation.js";

const COMPLETION_TOKENS = 160; // the API's own default is 16

/**
 * Fill `node` with the answer to the messages before it; call `changed` after each change.
 *
 * The node gets `status`, `text`, `reasoning`, `model`, `finish`, `error` ({message, status, retryAfterS}), `servers` (as in the
 * API), `happenings` ({atS, ...event}), `startedMs`, `firstS` (seconds to the first token), `writingS` (seconds from
 * the first token to the last), and `tokens`. Never throws.
 */
export async function answer(conversation, node, signal, changed) {
  Object.assign(node, {
    status: "writing", text: "", reasoning: "", model: conversation.model, finish: null, error: null,
    servers: [], happenings: [], startedMs: Date.now(), firstS: null, writingS: 0, tokens: 0,
  });
  changed();
  const beganMs = performance.now();
  const parent = conversation.nodes[node.parent];
  const isChat = conversation.mode === "chat";
  try {
    const path = isChat ? "/v1/chat/completions" : "/v1/completions";
    const response = await postJson(path, bodyOf(conversation, parent, isChat), { signal });
    let isWhole = false;
    for await (const { data } of serverEvents(response)) {
      if (data === "[DONE]") isWhole = true;
      else take(node, JSON.parse(data), (performance.now() - beganMs) / 1000);
      changed();
    }
    if (!isWhole) throw new ApiError(0, "The connection ended before the answer did.");
    node.status = "done";
  } catch (error) {
    node.status = error.name === "AbortError" ? "stopped" : "failed";
    if (node.status === "failed") {
      if (!(error instanceof ApiError)) console.error(error);
      node.error = { message: error.message, status: error.status ?? 0, retryAfterS: error.retryAfterS ?? null };
    }
  }
  changed();
}

function bodyOf(conversation, parent, isChat) {
  const body = { model: conversation.model, stream: true, stream_options: { include_usage: true, include_servers: true } };
  if (isChat) body.messages = messagesFor(conversation, parent);
  else Object.assign(body, { prompt: promptFor(conversation, parent), max_tokens: COMPLETION_TOKENS });
  for (const [name, value] of Object.entries(conversation.sampling)) if (value !== null) body[name] = value;
  return body;
}

function take(node, chunk, nowS) {
  if (chunk.error) throw new ApiError(503, chunk.error.message);
  if (chunk.usage) node.tokens = chunk.usage.completion_tokens;
  if (chunk.swarm?.servers) node.servers = chunk.swarm.servers;
  if (chunk.swarm?.event) node.happenings.push({ atS: nowS, ...chunk.swarm.event });
  const choice = chunk.choices[0];
  if (!choice) return;
  const text = choice.text ?? choice.delta.content ?? "";
  const reasoning = choice.delta?.reasoning_content ?? "";
  if (text || reasoning) {
    node.firstS ??= nowS;
    node.text += text;
    node.reasoning += reasoning;
    node.tokens += 1; // an estimate until the API sends the number at the end
    node.writingS = nowS - node.firstS;
  }
  node.finish = choice.finish_reason ?? node.finish;
}
