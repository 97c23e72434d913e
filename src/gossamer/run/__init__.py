"""A plan and a module become a trainer: the step loop, its supervision, its records. Running never searches."""
