"""The local web page and its JSON API: ``sscd-vec serve BANK`` (extra ``app``).

``create_app`` puts three layers around a bank: ``Guard`` (who may ask, how much, how long),
the routes of ``server``, and ``Worker``, one thread that alone touches the encoder and the index
and takes requests in micro-batches.
"""
