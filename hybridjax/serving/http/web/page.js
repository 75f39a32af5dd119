"use strict";
// Everything that a server or a model says is put in place as text, never as markup.
(() => {
  const POLL_MS = 1000;
  const SAMPLES = 60;
  const byId = (id) => document.getElementById(id);
  const state = { server: null, messages: [], images: [], busy: null, rates: [] };

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function headers() {
    const key = byId("key").value.trim();
    return key ? { authorization: `Bearer ${key}` } : {};
  }

  // The live numbers.

  const whole = (value) => Math.round(value).toLocaleString("en");
  const percent = (value) => `${Math.round(100 * value)} %`;
  const seconds = (value) =>
    value === null ? "–" : value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;
  const numbers = {
    running: whole, waiting: whole, finished: whole, generated_tokens: whole,
    first_token_seconds: seconds, cache_hit_rate: percent,
    tokens_per_second: (value) => value.toFixed(1),
  };

  function showState(kind, text) {
    const badge = byId("state");
    if (badge.textContent === text) return;
    badge.dataset.state = kind;
    badge.textContent = text;
  }

  function show(server) {
    // In a short context the whole answer must fit beside a prompt.
    if (!state.server && server.context_length < 1024) {
      byId("max_tokens").value = Math.max(1, Math.floor(server.context_length / 2));
    }
    state.server = server;
    byId("model").textContent = server.model;
    document.title = `${server.model} · hybridjax`;
    showState(server.state, server.state);
    for (const [id, format] of Object.entries(numbers)) byId(id).textContent = format(server[id]);
    for (const id of ["page_share", "slot_share"]) {
      byId(id).value = server[id];
      byId(`${id}_text`).textContent = percent(server[id]);
    }
    state.rates = [...state.rates, server.tokens_per_second].slice(-SAMPLES);
    drawRates();
    byId("attach").hidden = !(server.images && server.chat);
    byId("system-field").hidden = !server.chat;
    const label = server.chat ? "Message" : "Text to continue";
    byId("text").placeholder = label;
    byId("text-label").textContent = label;
  }

  function drawRates() {
    const top = Math.max(1, ...state.rates);
    const step = 120 / (SAMPLES - 1);
    const first = SAMPLES - state.rates.length;
    const points = state.rates.map((rate, i) =>
      `${((first + i) * step).toFixed(1)},${(31 - 30 * rate / top).toFixed(1)}`);
    byId("spark-line").setAttribute("points", points.join(" "));
    byId("spark-area").setAttribute("points", `${(first * step).toFixed(1)},32 ${points.join(" ")} 120,32`);
  }

  async function poll() {
    if (!document.hidden) {
      try {
        const reply = await fetch("web/state", { headers: headers(), cache: "no-store" });
        if (reply.ok) show(await reply.json());
        else if (reply.status === 401) needKey();
        else showState("failed", `HTTP ${reply.status}`);
      } catch {
        showState("failed", "unreachable");
      }
    }
    setTimeout(poll, POLL_MS);
  }

  function needKey() {
    showState("waiting", "needs a key");
    byId("access").open = true;
  }

  // The conversation.

  function addMessage(role, text, images) {
    byId("empty").hidden = true;
    const box = make("article", `message ${role}`);
    const parts = { box, body: make("div", "body", text), facts: make("div", "facts"), reasoning: null };
    box.append(make("div", "who", role === "user" ? "You" : state.server ? state.server.model : "Model"));
    if (images && images.length) {
      const pictures = make("div", "pictures");
      images.forEach((url, i) => pictures.append(picture(url, `Image ${i + 1}`)));
      box.append(pictures);
    }
    box.append(parts.body, parts.facts);
    byId("log").append(box);
    scrollDown(true);
    return parts;
  }

  function picture(url, description) {
    const image = make("img");
    image.src = url;
    image.alt = description;
    return image;
  }

  function scrollDown(always) {
    const log = byId("log");
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
  }

  function addReasoning(parts, text) {
    if (!parts.reasoning) {
      const details = make("details");
      parts.reasoning = make("div", "body");
      details.append(make("summary", "", "Reasoning"), parts.reasoning);
      parts.box.insertBefore(details, parts.body);
    }
    parts.reasoning.append(text);
  }

  function sampling() {
    const body = {};
    for (const id of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
      const value = byId(id).value;
      if (value !== "") body[id] = Number(value);
    }
    return body;
  }

  function content(message) {
    if (!message.images.length) return message.text;
    const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
    return [...images, { type: "text", text: message.text }];
  }

  function requestOf(text) {
    const body = { model: "", stream: true, stream_options: { include_usage: true }, ...sampling() };
    if (!state.server || !state.server.chat) return ["v1/completions", { ...body, prompt: text }];
    const system = byId("system").value.trim();
    const messages = state.messages.map((m) => ({ role: m.role, content: content(m) }));
    if (system) messages.unshift({ role: "system", content: system });
    return ["v1/chat/completions", { ...body, messages }];
  }

  async function send(text, images) {
    state.messages.push({ role: "user", text, images });
    addMessage("user", text, images);
    const [path, body] = requestOf(text);
    const parts = addMessage("assistant", "");
    const answer = { text: "", tokens: null, reason: "", first: null, started: performance.now() };
    const stopper = new AbortController();
    setBusy(stopper);
    parts.box.classList.add("streaming");
    try {
      const reply = await fetch(path, {
        method: "POST",
        headers: { "content-type": "application/json", ...headers() },
        body: JSON.stringify(body),
        signal: stopper.signal,
      });
      if (reply.status === 401) needKey();
      if (!reply.ok) throw new Error((await reply.json()).error.message);
      await readEvents(reply.body, (event) => take(event, answer, parts));
    } catch (error) {
      if (stopper.signal.aborted) answer.reason = "stopped";
      else fail(parts, answer, error);
    }
    parts.box.classList.remove("streaming");
    finish(parts, answer);
  }

  function fail(parts, answer, error) {
    answer.reason = `failed: ${error.message}`;
    answer.failed = true;
    parts.box.classList.add("failed");
  }

  function finish(parts, answer) {
    const took = (performance.now() - answer.started) / 1000;
    const facts = [answer.reason || "ended"];
    if (answer.tokens !== null) facts.push(`${answer.tokens} tokens`, `${(answer.tokens / took).toFixed(1)} tokens/s`);
    if (answer.first !== null) facts.push(`first after ${seconds(answer.first)}`);
    parts.facts.textContent = facts.join(" · ");
    byId("announce").textContent = `${answer.text || "No text."} (${facts[0]})`;
    // A turn that failed or has no answer is not repeated to the model, whatever of its text has come.
    if (answer.text && !answer.failed) state.messages.push({ role: "assistant", text: answer.text, images: [] });
    else state.messages.pop();
    scrollDown(false);
    setBusy(null);
  }

  async function readEvents(stream, onEvent) {
    const decoder = new TextDecoder();
    const reader = stream.getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") onEvent(JSON.parse(line.slice(6)));
      }
    }
  }

  function take(event, answer, parts) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) answer.tokens = event.usage.completion_tokens;
    const choice = event.choices[0];
    if (!choice) return;
    const delta = choice.delta || choice;
    const text = delta.content || delta.text || "";
    if (delta.reasoning_content) addReasoning(parts, delta.reasoning_content);
    if (answer.first === null && (text || delta.reasoning_content)) {
      answer.first = (performance.now() - answer.started) / 1000;
    }
    if (text) parts.body.append(text);
    answer.text += text;
    if (choice.finish_reason) answer.reason = choice.finish_reason;
    scrollDown(false);
  }

  function setBusy(stopper) {
    state.busy = stopper;
    byId("stop").hidden = !stopper;
    byId("send").hidden = Boolean(stopper);
    byId("clear").disabled = Boolean(stopper);
    if (!stopper) byId("text").focus();
  }

  function submit() {
    const text = byId("text").value;
    if (state.busy || !text.trim()) return;
    const images = state.images;
    byId("text").value = "";
    state.images = [];
    showAttached();
    send(text, images);
  }

  function stop() {
    if (state.busy) state.busy.abort();
  }

  function clear() {
    state.messages = [];
    for (const message of document.querySelectorAll(".message")) message.remove();
    byId("empty").hidden = false;
    byId("text").focus();
  }

  // Images.

  function attach(files) {
    const room = state.server && state.server.images ? state.server.images.max_count : 0;
    for (const file of files) {
      if (!file.type.startsWith("image/")) continue;
      const reader = new FileReader();
      reader.addEventListener("load", () => {
        const before = state.messages.reduce((sum, m) => sum + m.images.length, 0);
        if (before + state.images.length >= room) {
          byId("announce").textContent = `At most ${room} images.`;
          return;
        }
        state.images.push(reader.result);
        showAttached();
      });
      reader.readAsDataURL(file);
    }
  }

  function showAttached() {
    const list = byId("attached");
    list.replaceChildren(...state.images.map((url, i) => {
      const item = make("li");
      const remove = make("button", "", "×");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove image ${i + 1}`);
      remove.addEventListener("click", () => {
        state.images.splice(i, 1);
        showAttached();
      });
      item.append(picture(url, `Attached image ${i + 1}`), remove);
      return item;
    }));
    list.hidden = !state.images.length;
  }

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("access-form").addEventListener("submit", (event) => event.preventDefault());
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  byId("text").addEventListener("paste", (event) => {
    if (!byId("attach").hidden) attach(event.clipboardData.files);
  });
  byId("files").addEventListener("change", (event) => {
    attach(event.target.files);
    event.target.value = "";
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", clear);
  if (matchMedia("(max-width: 52rem)").matches) byId("settings").open = false;
  poll();
})();
