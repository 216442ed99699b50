"""Training scripts as people write them, each of a kind of its own, that save what they need and resume exactly."""

from __future__ import annotations

__all__ = ["REAL"]

_TOP = """
import collections, copy, glob, math, os, random, shutil, time
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
x, y = torch.randn(64, 4), torch.randn(64, 1)


def write(state, path="out/last.pt"):
    os.makedirs("out", exist_ok=True)
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def read(path="out/last.pt"):
    return torch.load(path, weights_only=False) if os.path.exists(path) else None


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

"""

REAL = {
    name: _TOP + text
    for name, text in {
        "hidden state of a recurrent network": """
text = torch.randint(0, 20, (8, 97))
model = nn.ModuleDict({"e": nn.Embedding(20, 8), "r": nn.LSTM(8, 16, batch_first=True), "o": nn.Linear(16, 20)})
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
at, hidden = 0, None
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    at, hidden = saved["at"], saved["hidden"]
while at < 96:
    out, hidden = model["r"](model["e"](text[:, at : at + 4]), hidden)
    loss = F.cross_entropy(model["o"](out).flatten(0, 1), text[:, at + 1 : at + 5].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    hidden = tuple(one.detach() for one in hidden)
    at += 4
    if at % 16 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "at": at, "hidden": hidden})
""",
        "two networks against each other": """
noise = torch.Generator().manual_seed(3)
maker, judge = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), small()
optimizers = [torch.optim.Adam(one.parameters(), lr=0.01, betas=(0.5, 0.9)) for one in (maker, judge)]
parts = {"maker": maker, "judge": judge, "first": optimizers[0], "second": optimizers[1]}
step = 0
if saved := read():
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    noise.set_state(saved["noise"])
    step = saved["step"]
while step < 18:
    real, fake = x[8 * step % 64 :][:8], maker(torch.randn(8, 2, generator=noise))
    update(optimizers[1], F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean())
    if step % 3 == 2:
        update(optimizers[0], F.softplus(-judge(maker(torch.randn(8, 2, generator=noise)))).mean())
    step += 1
    if step % 4 == 0:
        write({**{name: part.state_dict() for name, part in parts.items()}, "noise": noise.get_state(), "step": step})
""",
        "L-BFGS on all data": """
model = nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4, line_search_fn="strong_wolfe")
step = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]


def closure():
    optimizer.zero_grad()
    loss = (torch.tanh(model(x)) - y).pow(4).mean()
    loss.backward()
    return loss


while step < 12:
    optimizer.step(closure)
    step += 1
    if step % 3 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
""",
        "mixed precision with a scaled loss": """
model = small()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
step = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    step = saved["step"]
while step < 20:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(model(x[8 * step % 64 :][:8]).float(), y[8 * step % 64 :][:8])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    step += 1
    if step % 6 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
               "step": step})
""",
        "averaged copy from the sixth step on, swapped in to evaluate": """
model, ema = small(), None
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    if saved["ema"] is not None:
        ema = copy.deepcopy(model)
        ema.load_state_dict(saved["ema"])
while step < 24:
    update(optimizer, F.mse_loss(model(x[8 * step % 64 :][:8]), y[8 * step % 64 :][:8]))
    step += 1
    if step == 6:
        ema = copy.deepcopy(model)
    elif step > 6:
        with torch.no_grad():
            for mean, weight in zip(ema.parameters(), model.parameters()):
                mean.lerp_(weight, 0.1)
    if step % 8 == 0:
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(ema.state_dict())
        with torch.no_grad():
            F.mse_loss(model(x), y)
        model.load_state_dict(kept)
    if step % 5 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
               "ema": None if ema is None else ema.state_dict()})
""",
        "groups of weights, warm-up and cosine": """
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 1))
flat = [weight for weight in model.parameters() if weight.ndim < 2]
groups = [{"params": [weight for weight in model.parameters() if weight.ndim > 1], "weight_decay": 0.1},
          {"params": flat, "weight_decay": 0.0, "lr": 0.02}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
curve = lambda step: min(1.0, step / 4) * 0.5 * (1 + math.cos(math.pi * step / 24))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, curve)
epoch = batch = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    epoch, batch = saved["epoch"], saved["batch"]
    torch.set_rng_state(saved["rng"])
while epoch < 3:
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True, generator=torch.Generator().manual_seed(epoch))
    for number, (inputs, wanted) in enumerate(loader):
        if number < batch:
            continue
        update(optimizer, F.mse_loss(model(inputs), wanted))
        scheduler.step()
        batch += 1
        if batch % 3 == 0:
            write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "batch": batch,
                   "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()})
    epoch, batch = epoch + 1, 0
""",
        "rate lowered on a plateau, stopped early": """
model = small()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
epoch, best, bad = 0, math.inf, 0
if saved := read():
    for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        part.load_state_dict(saved[name])
    epoch, best, bad = saved["epoch"], saved["best"], saved["bad"]
while epoch < 20 and bad < 4:
    for begin in range(0, 48, 24):
        update(optimizer, F.mse_loss(model(x[begin : begin + 24]), y[begin : begin + 24]))
    model.eval()
    with torch.no_grad():
        loss = F.mse_loss(model(x[48:]), y[48:]).item()
    model.train()
    scheduler.step(loss)
    best, bad = (loss, 0) if loss < best else (best, bad + 1)
    epoch += 1
    write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
           "epoch": epoch, "best": best, "bad": bad})
""",
        "one cycle of rate and momentum": """
model = small()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=25)
step = 0
if saved := read():
    for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        part.load_state_dict(saved[name])
    step = saved["step"]
while step < 24:
    update(optimizer, F.mse_loss(model(x[8 * step % 64 :][:8]), y[8 * step % 64 :][:8]))
    scheduler.step()
    step += 1
    if step % 7 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
               "scheduler": scheduler.state_dict()})
""",
        "stream with a position": """
class Stream(IterableDataset):
    def __init__(self, start):
        self.start = start

    def __iter__(self):
        for number in range(self.start, 96):
            yield torch.randn(5, generator=torch.Generator().manual_seed(number))


model = small()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)
seen = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    seen = saved["seen"]
for row in DataLoader(Stream(seen), batch_size=4):
    update(optimizer, F.mse_loss(model(row[:, :4]), row[:, 4:]))
    seen += len(row)
    if seen % 20 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": seen})
""",
        "two workers": """
class Noisy(Dataset):
    def __init__(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 32

    def __getitem__(self, number):
        noise = torch.Generator().manual_seed(1000 * self.epoch + number)
        return x[number] + 0.1 * torch.randn(4, generator=noise), y[number]


model = small()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
epoch = batch = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    epoch, batch = saved["epoch"], saved["batch"]
while epoch < 3:
    generator = torch.Generator().manual_seed(epoch)
    batches = iter(DataLoader(Noisy(epoch), 4, shuffle=True, num_workers=2, generator=generator))
    for _ in range(batch):
        next(batches)
    for inputs, wanted in batches:
        update(optimizer, F.mse_loss(model(inputs), wanted))
        batch += 1
        if batch == 5:
            write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "batch": batch})
    epoch, batch = epoch + 1, 0
    write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "batch": batch})
""",
        "workers that stay, sampler with a position": """
class Order(Sampler):
    def __init__(self):
        self.epoch = self.start = 0

    def __iter__(self):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[self.start :])

    def __len__(self):
        return 32 - self.start


model = small()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
order, epoch, batch = Order(), 0, 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    epoch, batch = saved["epoch"], saved["batch"]
loader = DataLoader(TensorDataset(x, y), 4, sampler=order, num_workers=2, persistent_workers=True)
while epoch < 3:
    order.epoch, order.start = epoch, 4 * batch
    for inputs, wanted in loader:
        update(optimizer, F.mse_loss(model(inputs), wanted))
        batch += 1
        if batch in (3, 8):
            write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "batch": batch})
    epoch, batch = epoch + 1, 0
""",
        "weighted sampler": """
model = small()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(2)
sampler = torch.utils.data.WeightedRandomSampler(torch.arange(1.0, 65.0), 32, generator=generator)
loader = DataLoader(TensorDataset(x, y), 4, sampler=sampler)
epoch = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    generator.set_state(saved["generator"])
    epoch = saved["epoch"]
for epoch in range(epoch, 4):
    for inputs, wanted in loader:
        update(optimizer, F.mse_loss(model(inputs), wanted))
    write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1,
           "generator": generator.get_state()})
""",
        "replay buffer and target network": """
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
target = copy.deepcopy(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
buffer, place, turn = collections.deque(maxlen=40), [0.0] * 4, 0
if saved := read():
    net.load_state_dict(saved["net"])
    target.load_state_dict(saved["target"])
    optimizer.load_state_dict(saved["optimizer"])
    buffer, place, turn = saved["buffer"], saved["place"], saved["turn"]
    random.setstate(saved["random"])
while turn < 60:
    with torch.no_grad():
        action = random.randrange(2) if random.random() < 0.3 else int(net(torch.tensor(place)).argmax())
    after = [0.9 * one + (0.1 if action else -0.1) + random.gauss(0, 0.1) for one in place]
    buffer.append((place, action, -abs(sum(after)), after))
    place = after
    turn += 1
    if len(buffer) > 10 and turn % 2 == 0:
        states, actions, rewards, nexts = map(torch.tensor, zip(*random.sample(buffer, 8)))
        with torch.no_grad():
            wanted = rewards + 0.9 * target(nexts).max(1).values
        update(optimizer, F.smooth_l1_loss(net(states).gather(1, actions[:, None])[:, 0], wanted))
    if turn % 20 == 0:
        target.load_state_dict(net.state_dict())
    if turn % 22 == 0:
        write({"net": net.state_dict(), "target": target.state_dict(), "optimizer": optimizer.state_dict(),
               "buffer": buffer, "place": place, "turn": turn, "random": random.getstate()})
""",
        "policy gradient": """
policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
episode, baseline = 0, 0.0
if saved := read():
    policy.load_state_dict(saved["policy"])
    optimizer.load_state_dict(saved["optimizer"])
    episode, baseline = saved["episode"], saved["baseline"]
    torch.set_rng_state(saved["rng"])
while episode < 20:
    place, logs, gain = torch.zeros(4), [], 0.0
    for _ in range(5):
        chosen = torch.distributions.Categorical(logits=policy(place))
        action = chosen.sample()
        logs.append(chosen.log_prob(action))
        place = 0.9 * place + (2 * action - 1) * 0.1 + 0.1 * torch.randn(4)
        gain -= place.abs().sum().item()
    update(optimizer, -(gain - baseline) * torch.stack(logs).sum())
    baseline = 0.9 * baseline + 0.1 * gain
    episode += 1
    if episode % 6 == 0:
        write({"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "episode": episode,
               "baseline": baseline, "rng": torch.get_rng_state()})
""",
        "saved by the clock": """
model = small()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step, last = 0, time.time()
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 40:
    update(optimizer, F.mse_loss(model(x[8 * step % 64 :][:8]), y[8 * step % 64 :][:8]))
    time.sleep(0.02)
    step += 1
    if time.time() - last > 0.2:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
        last = time.time()
""",
        "new names with a link to the latest, two are kept": """
model = small()
optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
step = 0
if saved := read("out/latest.pt"):
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 24:
    update(optimizer, F.mse_loss(model(x[8 * step % 64 :][:8]), y[8 * step % 64 :][:8]))
    step += 1
    if step % 4 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        write(state, f"out/step-{step:06}.pt")
        if os.path.lexists("out/link"):
            os.remove("out/link")
        os.symlink(f"step-{step:06}.pt", "out/link")
        os.replace("out/link", "out/latest.pt")
        for old in sorted(glob.glob("out/step-*.pt"))[:-2]:
            os.remove(old)
""",
        "distributed checkpoint of one process": """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

model = small()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = 0
found = sorted(glob.glob("out/step-*/.metadata"))
if found:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=os.path.dirname(found[-1]))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = int(state["step"])
while step < 20:
    update(optimizer, F.mse_loss(model(x[8 * step % 64 :][:8]), y[8 * step % 64 :][:8]))
    step += 1
    if step % 5 == 0:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.tensor(step)}
        dcp.save(state, checkpoint_id=f"out/step-{step:06}")
""",
        "weights as safetensors beside the rest": """
from safetensors.torch import load_file, save_file

model = small()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
step = 0
if os.path.exists("out/last"):
    folder = os.path.realpath("out/last")
    model.load_state_dict(load_file(folder + "/model.safetensors"))
    saved = read(folder + "/training.pt")
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 20:
    update(optimizer, F.mse_loss(model(x[8 * step % 64 :][:8]), y[8 * step % 64 :][:8]))
    step += 1
    if step % 5 == 0:
        folder = f"out/step-{step}"
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        save_file(model.state_dict(), folder + "/model.safetensors")
        torch.save({"optimizer": optimizer.state_dict(), "step": step}, folder + "/training.pt")
        if os.path.lexists("out/new"):
            os.remove("out/new")
        os.symlink(f"step-{step}", "out/new")
        os.replace("out/new", "out/last")
""",
        "gathered gradients with a rest at the end of the epoch": """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
epoch = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    epoch = saved["epoch"]
while epoch < 5:
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True, generator=torch.Generator().manual_seed(epoch))
    optimizer.zero_grad(set_to_none=False)
    for number, (inputs, wanted) in enumerate(loader, 1):
        (F.mse_loss(model(inputs), wanted) / 3).backward()
        if number % 3 == 0 or number == len(loader):
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    epoch += 1
    write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch})
""",
        "mixed samples by NumPy": """
model = small()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
while step < 20:
    chosen = np.random.choice(64, 8, replace=False)
    share, other = float(np.random.beta(0.4, 0.4)), torch.randperm(8)
    inputs, wanted = x[chosen], y[chosen]
    out = model(share * inputs + (1 - share) * inputs[other])
    update(optimizer, share * F.mse_loss(out, wanted) + (1 - share) * F.mse_loss(out, wanted[other]))
    step += 1
    if step % 6 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
               "numpy": np.random.get_state(), "torch": torch.get_rng_state()})
""",
        "queue of keys in buffers": """
class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 8), nn.Linear(4, 8)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(32, 8), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, first, second):
        with torch.no_grad():
            for mean, weight in zip(self.key.parameters(), self.query.parameters()):
                mean.lerp_(weight, 0.1)
            keys = F.normalize(self.key(second), dim=1)
        queries = F.normalize(self.query(first), dim=1)
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().T], dim=1)
        at = int(self.place)
        self.queue[at : at + 8] = keys
        self.place.fill_((at + 8) % 32)
        return F.cross_entropy(scores / 0.2, torch.zeros(8, dtype=torch.long))


model = Contrast()
optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)
step = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 20:
    batch = x[8 * step % 64 :][:8]
    update(optimizer, model(batch, batch.flip(1)))
    step += 1
    if step % 6 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
""",
        "weights averaged in the last epochs": """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
mean = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
late = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
parts = {"model": model, "mean": mean, "optimizer": optimizer, "cosine": cosine, "late": late}
epoch = 0
if saved := read():
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    epoch = saved["epoch"]
while epoch < 6:
    generator = torch.Generator().manual_seed(epoch)
    for inputs, wanted in DataLoader(TensorDataset(x, y), 16, shuffle=True, generator=generator):
        update(optimizer, F.mse_loss(model(inputs), wanted))
    if epoch >= 3:
        mean.update_parameters(model)
        late.step()
    else:
        cosine.step()
    epoch += 1
    write({**{name: part.state_dict() for name, part in parts.items()}, "epoch": epoch})
torch.optim.swa_utils.update_bn(DataLoader(TensorDataset(x), 16), mean)
""",
        "random pieces of a text, evaluated before each save": """
text = torch.randint(0, 12, (400,))
embed = nn.Embedding(12, 8)
head = nn.Linear(8, 12, bias=False)
head.weight = embed.weight
model = nn.Sequential(embed, nn.Dropout(0.1), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), head)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
step = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    torch.set_rng_state(saved["rng"])


def pieces():
    begins = torch.randint(0, 390, (4,))
    length = 4 if step < 10 else 8
    found = torch.stack([text[at : at + length + 1] for at in begins])
    return found[:, :-1], found[:, 1:]


while True:
    if step % 5 == 0:
        rng = torch.get_rng_state()
        model.eval()
        with torch.no_grad():
            inputs, wanted = pieces()
            F.cross_entropy(model(inputs).flatten(0, 1), wanted.flatten())
        model.train()
        if step:
            write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "rng": rng})
    if step == 20:
        break
    inputs, wanted = pieces()
    update(optimizer, F.cross_entropy(model(inputs).flatten(0, 1), wanted.flatten()))
    step += 1
""",
        "an optimizer of one's own around another": """
class Sharpness(torch.optim.Optimizer):
    def __init__(self, weights, base, **options):
        super().__init__(weights, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        closure()
        moved = []
        for group in self.param_groups:
            for weight in group["params"]:
                move = 0.05 * weight.grad / (weight.grad.norm() + 1e-12)
                weight.add_(move)
                moved.append((weight, move))
        closure()
        for weight, move in moved:
            weight.sub_(move)
        self.base.step()


model = small()
optimizer = Sharpness(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
step = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.base.load_state_dict(saved["optimizer"])
    optimizer.param_groups = optimizer.base.param_groups
    step = saved["step"]
while step < 20:

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[8 * step % 64 :][:8]), y[8 * step % 64 :][:8])
        loss.backward()
        return loss

    optimizer.step(closure)
    step += 1
    if step % 6 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.base.state_dict(), "step": step})
""",
        "sparse gradients": """
model = nn.EmbeddingBag(50, 4, sparse=True, mode="sum")
optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
step = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 20:
    rows = torch.randint(0, 50, (8, 3), generator=torch.Generator().manual_seed(step))
    update(optimizer, F.mse_loss(model(rows), x[:8]))
    step += 1
    if step % 6 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
""",
        "a head on a body that is frozen and not saved": """
body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False).eval()
head = nn.Linear(16, 1)
optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
step = 0
if saved := read():
    head.load_state_dict(saved["head"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 20:
    update(optimizer, F.mse_loss(head(body(x[8 * step % 64 :][:8])), y[8 * step % 64 :][:8]))
    step += 1
    if step % 6 == 0:
        write({"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
""",
        "two stages, each with an optimizer of its own": """
body, head = nn.Linear(4, 8), nn.Linear(8, 1)
decoder = nn.Linear(8, 4)
optimizers = []
stage, step = 0, 0
saved = read()
if saved:
    body.load_state_dict(saved["body"])
    head.load_state_dict(saved["head"])
    decoder.load_state_dict(saved["decoder"])
    stage, step = saved["stage"], saved["step"]
while stage < 2:
    weights = [body.parameters, decoder.parameters] if stage == 0 else [body.parameters, head.parameters]
    optimizer = torch.optim.Adam([weight for one in weights for weight in one()], lr=0.01)
    optimizers.append(optimizer)
    if saved and saved["stage"] == stage:
        optimizer.load_state_dict(saved["optimizer"])
    while step < 10:
        inputs, wanted = x[8 * step % 64 :][:8], y[8 * step % 64 :][:8]
        out = torch.relu(body(inputs))
        update(optimizer, F.mse_loss(decoder(out), inputs) if stage == 0 else F.mse_loss(head(out), wanted))
        step += 1
        if step in (4, 8):
            write({"body": body.state_dict(), "head": head.state_dict(), "decoder": decoder.state_dict(),
                   "optimizer": optimizer.state_dict(), "stage": stage, "step": step})
    stage, step, saved = stage + 1, 0, None
""",
        "half-precision weights beside those that train": """
model = small().bfloat16()
master = [nn.Parameter(weight.detach().float()) for weight in model.parameters()]
optimizer = torch.optim.AdamW(master, lr=0.01)
step = 0
if saved := read():
    for weight, value in zip(master, saved["master"]):
        weight.data.copy_(value)
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 20:
    with torch.no_grad():
        for weight, value in zip(model.parameters(), master):
            weight.copy_(value)
    model.zero_grad()
    loss = F.mse_loss(model(x[8 * step % 64 :][:8].bfloat16()).float(), y[8 * step % 64 :][:8])
    loss.backward()
    for weight, value in zip(model.parameters(), master):
        value.grad = weight.grad.float()
    optimizer.step()
    step += 1
    if step % 6 == 0:
        write({"master": [one.detach() for one in master], "optimizer": optimizer.state_dict(), "step": step})
""",
        "spectral norm": """
norm = nn.utils.parametrizations.spectral_norm
model = nn.Sequential(norm(nn.Linear(4, 8)), nn.ReLU(), norm(nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
if saved := read():
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 20:
    update(optimizer, F.mse_loss(model(x[8 * step % 64 :][:8]), y[8 * step % 64 :][:8]))
    step += 1
    if step % 6 == 0:
        write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
""",
    }.items()
}
