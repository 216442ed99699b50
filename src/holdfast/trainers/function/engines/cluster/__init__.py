"""The cluster engine: an agent on each node runs what the local engine runs on a machine; the driver talks to them.

engine (of the driver, one thread) -> agents (connections to them) -> agent (on a node) ->
`holdfast.trainers.function.engines.local`.
nodes: the interface that finds nodes and starts agents there, and which rank runs where; ray_nodes implements it with
Ray, and only ray_nodes and ray_api import Ray.
May import the local engine; never the controller or the workers.
"""
