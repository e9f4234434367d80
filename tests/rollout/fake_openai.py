"""A chat completions server for tests: standard library, a thread, answers from a function."""

import http.server
import json
import threading


class FakeOpenAI:
    """Serves on loopback. `answer(messages, body)` gives text, a list of (tool, arguments) pairs,
    or (status, headers) for an error. Every request body that got an answer is in `requests`."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []
        self.keys = []
        self.hits = 0
        self.connections = set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.hits += 1
                outer.connections.add(self.client_address)
                outer.keys.append(self.headers["Authorization"])
                result = outer.answer(body["messages"], body)
                if isinstance(result, tuple):
                    status, headers = result
                    self.send(status, b'{"error": {"message": "told to"}}', headers)
                    return
                outer.requests.append(body)
                message = {"role": "assistant", "content": result}
                if isinstance(result, list):
                    message = {"role": "assistant", "content": None, "tool_calls": [
                        {"id": f"call_{outer.hits}_{i}", "type": "function",
                         "function": {"name": name, "arguments": json.dumps(arguments)}}
                        for i, (name, arguments) in enumerate(result)]}
                usage = {"prompt_tokens": sum(len((m["content"] or "").split())
                                              for m in body["messages"]), "completion_tokens": 5}
                if body.get("stream"):
                    self.send(200, outer.stream(message, usage), {})
                else:
                    self.send(200, json.dumps({"choices": [{
                        "message": message, "finish_reason": "stop"}], "usage": usage}).encode(),
                        {})

            def send(self, status, data, headers):
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    @staticmethod
    def stream(message, usage):
        deltas = [{"role": "assistant", "content": ""}]
        text = message["content"] or ""
        deltas += [{"content": text[i:i + 7]} for i in range(0, len(text), 7)]
        for index, call in enumerate(message.get("tool_calls", ())):
            arguments = call["function"]["arguments"]
            deltas.append({"tool_calls": [{**call, "index": index, "function": {
                "name": call["function"]["name"], "arguments": arguments[:5]}}]})
            deltas.append({"tool_calls": [{"index": index,
                                           "function": {"arguments": arguments[5:]}}]})
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        chunks.append({"choices": [], "usage": usage})
        return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + \
            b"data: [DONE]\n\n"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02},
                         daemon=True).start()
        return self

    def __exit__(self, *args):
        self.server.shutdown()
        self.server.server_close()


def block(command):
    """A text-mode answer."""
    return f"```bash\n{command}\n```"
