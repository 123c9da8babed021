"""Indexes people already run, behind the same verbs: FAISS, Milvus, ThreatExchange.

Import what you use: ``from sscd_vec.adapters.faiss import FaissIndex``. This file imports
nothing, so that one adapter never loads another's library.
"""
