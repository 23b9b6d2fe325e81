"""Experiments: a small decoder, its training loop, text generation, and the comparison of encodings.

Text, train, generate:

>>> import locant
>>> text = "to be, or not to be: that is the question. " * 80
>>> model, tokenizer = locant.lab.train(text, "rotary", vocab_size=300, num_steps=60, train_length=16, d_model=32)
>>> ids = locant.lab.generate(model, tokenizer.encode("to be, or"), 8, temperature=0.0)
>>> tokenizer.decode(ids)
'to be, or not to be: that is the question'

`save` writes the model and the tokenizer to a folder, and `load` reads them. `locant generate` uses such a folder.

Compare encodings at lengths that they were not trained at:

>>> settings = locant.lab.Settings(encodings=("nope", "alibi"), seeds=(0,), num_steps=2, train_length=8, d_model=16)
>>> results = locant.lab.compare(tokenizer.encode(text), tokenizer.vocab_size, settings)
>>> [(record.encoding, list(record.loss_by_length)) for record in results.records]
[('nope', [8, 16, 32, 64]), ('alibi', [8, 16, 32, 64])]
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
