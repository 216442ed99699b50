"""One run, three processes: it trains here, another process evaluates, a third one serves, and nobody waits.

    python examples/follow_run.py [FOLDER]

The trainer keeps what the evaluator finds best (`Keep(best=1, metric="val_loss")`), although it computes no validation
loss itself. The server answers while newer weights arrive, and swaps them between two answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

import holdfast as hf

STEPS = 60


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give inputs and targets."""
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True)


def train(run: str) -> None:
    """Train and save every ten steps; retention ranks by a metric that comes from elsewhere."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    keep = hf.Keep(last=2, best=1, metric="val_loss")
    x, y = data(seed=1)
    with hf.Checkpointer(run, {"model": model, "optimizer": optimizer}, every=10, keep=keep) as ck:
        while ck.global_step < STEPS:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ck.step(loss=loss)
            time.sleep(0.03)  # a real step takes longer


def evaluate(run: str) -> None:
    """Evaluate each checkpoint as it comes; retention leaves it alone meanwhile, for at most ten minutes."""
    x, y = data(seed=2)
    model = torch.nn.Linear(8, 1)
    for checkpoint in hf.follow(run, start="first", hold_s=600):
        checkpoint.load(into={"model": model}, only="model")
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(x), y)
        checkpoint.report(val_loss=loss)
        print(f"evaluator: step {checkpoint.step}, val_loss {loss:.4f}", flush=True)


class Server:
    """Serves the newest weights that are whole; `current` is swapped, never changed."""

    def __init__(self) -> None:
        self.current: tuple[int, torch.nn.Module] = (-1, torch.nn.Linear(8, 1))

    def follow(self, run: str) -> None:
        """Take each newer checkpoint, skipping those that were overtaken."""
        for checkpoint in hf.follow(run, only_newest=True, verify=True, hold_s=60):
            model = torch.nn.Linear(8, 1)  # aside: the one in use answers on
            checkpoint.load(into={"model": model}, only="model")
            self.current = (checkpoint.step or 0, model.eval())

    def answer(self, values: list[float]) -> dict[str, float]:
        """Answer one request with whatever weights are current when it begins."""
        step, model = self.current
        with torch.no_grad():
            return {"step": step, "y": model(torch.tensor([values])).item()}


def serve(run: str) -> None:
    """Answer on a free port of this machine until the parent ends."""
    server = Server()
    threading.Thread(target=server.follow, args=(run,), daemon=True).start()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = json.dumps(server.answer(json.loads(body))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(http.server_port, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), http.shutdown()), daemon=True).start()
    http.serve_forever()


def main(run: str) -> None:
    """Start the three, and ask the server all the time."""
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    others = [subprocess.Popen([sys.executable, __file__, role, run]) for role in ("evaluate", "train")]
    steps: list[int] = []
    answers = 0
    while not steps or steps[-1] < STEPS:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps([1.0] * 8).encode()), timeout=60) as reply:
            step = int(json.load(reply)["step"])
        answers += 1
        if step not in (-1, *steps[-1:]):
            steps.append(step)
        if others[1].poll() not in (None, 0):
            raise SystemExit("the trainer failed")
        time.sleep(0.01)
    codes = [other.wait() for other in others]
    server.communicate()
    best = hf.Checkpoint(subprocess.check_output([sys.executable, "-m", "holdfast", "best", run], text=True).strip())
    print(f"server: {answers} answers, none failed; weights of steps {steps}")
    print(f"best: step {best.step}, val_loss {best.metrics['val_loss']:.4f}; exit codes {codes}")


if __name__ == "__main__":
    roles = {"train": train, "evaluate": evaluate, "serve": serve}
    if len(sys.argv) == 3 and sys.argv[1] in roles:
        roles[sys.argv[1]](sys.argv[2])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else str(Path(tempfile.mkdtemp()) / "run"))
