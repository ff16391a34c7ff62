"""Plugins that take an engine's Engram rows from a server, in place of tables of its own.

`vllm` and `sglang` are found by the engines through their entry points and do nothing unless ENGRAM_SERVER_TARGET is
set; `Settings` lists what else can be. Neither engine is imported before it loads its plugins.
"""
