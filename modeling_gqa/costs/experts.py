"""Mixture-of-experts MLPs, which this package's models do not have and models that are compared with them may have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """The MLP of a layer with a router: each token takes some of its experts.

    Args:
        number: of experts.
        chosen: how many of them a token takes.
        size: weights of one expert.
        shared: weights that every token takes: the router's and those of shared experts.

    Example:
        ```python
        from modeling_gqa.costs import Experts

        experts = Experts(number=8, chosen=2, size=100, shared=10)
        print(experts.stored, experts.per_token)  # 810 210
        print(experts.read(tokens=1), experts.read(tokens=1000))  # 210.0 810.0
        ```
    """

    number: int
    chosen: int
    size: int
    shared: int

    @property
    def stored(self) -> int:
        """Number of weights."""
        return self.number * self.size + self.shared

    @property
    def per_token(self) -> int:
        """Number of weights that one token is multiplied by."""
        return self.chosen * self.size + self.shared

    def read(self, tokens: int) -> float:
        """Expected number of weights that `tokens` tokens take together, if each takes any experts equally likely."""
        missed = (1 - self.chosen / self.number) ** tokens
        return self.number * (1 - missed) * self.size + self.shared
