"""The part of the model that one rank builds and holds: the full model, or the pipeline stages that the plan gives."""
