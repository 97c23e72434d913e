"""The trainer of one rank: build it from plan and module, run the step loop, write records. Running never searches."""
