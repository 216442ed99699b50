"""The engine that runs workers as processes of this machine."""
