"""Other systems on the case that ours is measured on: one after the other on this machine, in one run.

`command` is the benchmark; `case` what every system is given; `ours`, `by_driver` and `llama` run one system each;
`report` says the ratios. The files under `drivers` run in the peer's own interpreter and import nothing of this
project.
"""
