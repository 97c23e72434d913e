"""Choose with all ranks present: measure links and codecs, ask the planner, switch all ranks at one step."""
