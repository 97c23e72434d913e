"""Split of an unmodified model into pipeline stages.

Every stage runs the user's forward, with placeholders for the modules of other stages.

dataflow         calls of units in one forward, and which call reads which tensor
trace, tracer    trace one forward to find that data flow (value_trace, call_trace, parameter_trace, state_trace)
split_points     the first unit of every stage; what a stage then owns, receives and sends
stage            a module in which the units of other stages are placeholders
unit_calls       the calls of units in it: real, placeholder (placeholder_outputs) or shadow
in_flight        a micro-batch in a stage: backward, its two parts (split_backward), or its forward again (recompute)
meta_init        build only the parameters that a stage holds
input_variants   one data flow per kind of batch
reference        all stages in one process: the reference
"""
