"""A small OpenAI-compatible server that stands in for a judge: it grades by rules. Standard library only.

python judge_stub.py [--port 8100]
"""

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def grade(prompt: str) -> str:
    """Return a judge's reply for a prompt in the form of judge_prompt.txt."""
    reference = re.search(r"Reference answer: (.*)", prompt)
    answer = re.search(r"<answer_to_grade>\n(.*)\n</answer_to_grade>", prompt, re.DOTALL)
    text = answer[1] if answer else ""
    is_right = reference is not None and reference[1].strip() in re.findall(r"-?\d+", text)
    style = max(1, 10 - len(text) // 20)  # the shorter, the better
    return f"The answer has {len(text)} characters.\nCorrectness: {10 if is_right else 1}\nStyle: {style}"


class Handler(BaseHTTPRequestHandler):
    """Answers /v1/models and /v1/chat/completions."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """List the model."""
        self.answer({"object": "list", "data": [{"id": "stub-judge", "object": "model"}]})

    def do_POST(self) -> None:
        """Answer a chat."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": grade(request["messages"][-1]["content"])}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        self.answer({"object": "chat.completion", "model": request["model"], "choices": choices})

    def answer(self, body: dict[str, object]) -> None:
        """Send JSON."""
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log every request."""


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server that grades by rules.")
    parser.add_argument("--port", type=int, default=8100)
    server = ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler)
    print(f"stub judge on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
