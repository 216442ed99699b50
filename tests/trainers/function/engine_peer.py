"""The worker of the engine suite: runs functions that arrive as messages."""

from __future__ import annotations

import cloudpickle

from holdfast.writer.frames import Channel


def serve(channel: Channel, *, listen_fd: int = -1, use_gpu: bool = False) -> int:
    """Call each function that comes with the channel; send back what it returns. The end of the stream ends this."""
    facts = {"listen_fd": listen_fd, "use_gpu": use_gpu}
    while True:
        message = channel.receive()
        if message is None:
            return 0
        if message.header["do"] == "leave":
            return message.header["status"]
        value = cloudpickle.loads(message.attachments[0])(channel, facts, *message.attachments[1:])
        channel.send({"on": "value"}, [cloudpickle.dumps(value)])
