"""Python state that a forward may change, recorded object by object, to compare or restore (see `model/snapshot.py`).

record             how to restore and compare what was found so far
containers         dicts, lists, sets, arrays, files in memory
iterators          iterators of the standard library, and Python generators
code               functions, classes, and the globals and closures that they name
user_code          which code is the user's, and not a library's
random_generators  random generators of torch, numpy and Python
context_variables  context variables
"""
