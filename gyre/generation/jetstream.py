"""The only import of JetStream: its Engine contract, without TensorFlow.

`jetstream.engine.engine_api` pulls seqio and with it TensorFlow (over 600 MB, many seconds) for a
tokenizer class that gyre never uses. During this one import a stand-in takes the place of
`seqio.vocabularies`; it is removed afterwards, so that a later `import seqio` gets the real one.
JetStream also sets the root logger to DEBUG; its level is restored.
"""

import logging
import sys
import types


def _import_engine_api() -> types.ModuleType:
    if "jetstream.engine.engine_api" in sys.modules:
        return sys.modules["jetstream.engine.engine_api"]
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    stand_ins = {}
    if "seqio" not in sys.modules:
        vocabularies = types.ModuleType("seqio.vocabularies")
        vocabularies.SentencePieceVocabulary = type("SentencePieceVocabulary", (), {})
        vocabularies.Vocabulary = type("Vocabulary", (), {})
        seqio = types.ModuleType("seqio")
        seqio.vocabularies = vocabularies
        stand_ins = {"seqio": seqio, "seqio.vocabularies": vocabularies}
    sys.modules.update(stand_ins)
    try:
        from jetstream.engine import engine_api
    finally:
        for name in stand_ins:
            del sys.modules[name]
        root.setLevel(level)
        root.handlers[:] = handlers
    return engine_api


engine_api = _import_engine_api()
Engine = engine_api.Engine
ResultTokens = engine_api.ResultTokens
