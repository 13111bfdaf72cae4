"""`model.module` may be replaced, as in `model.module = torch.compile(model.module)`."""

from torch import nn

from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo


class Counted(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.module(*args, **kwargs)


def test_a_replaced_module_is_called_in_training_and_evaluation():
    model = private(zoo.seeded(lambda: zoo.mlp(6, 8, 3)))
    model.module = counted = Counted(model.module)
    private_loss(model, zoo.classes(4, 6), zoo.cross_entropy).backward()
    assert counted.calls >= 1
    before = counted.calls
    model.eval()(zoo.classes(4, 6)[0])
    assert counted.calls == before + 1
