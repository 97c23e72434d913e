"""The part of a model that one rank builds and holds: all of it, or the pipeline stages that the plan gives it."""
