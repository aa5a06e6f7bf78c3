"""The embedded cluster: every process of Kvist on one machine, supervised.

`layout` says where things lie, `process` keeps one child alive, `cluster` starts them in order, `view` shows them.
"""
