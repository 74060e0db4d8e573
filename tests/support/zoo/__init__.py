"""The parts of the zoo of models, by what each of them could get wrong; `tests.support.model_zoo` lists them all."""
