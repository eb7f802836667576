"""An environment of your own: buyer and seller haggle over a price, and the policy is both. It imports redline alone.

    cd examples
    redline env check haggle:Haggle
    redline env play haggle:Haggle                  # you are both; --model and --url let a model play
    python haggle.py                                # trains a tiny model for two steps

Each of the two knows what the article is worth to it. They name prices in turn; a price that the other has named too, or has
named better, closes the deal there, and both earn what they gained. Without a deal nobody earns anything.
"""

import redline
from redline import BudgetError, Policy, Task, Turn


class Haggle:
    """Called with the run's seed and the recipe's `params`."""

    def __init__(self, seed: int, rounds: int = 3, highest: int = 9) -> None:
        self.rounds, self.highest = rounds, highest

    def train(self, index: int) -> Task:
        """The same index gives the same task. Every ninth pair of values is held out."""
        return self.task(index + 1 + index // 8)

    def held_out(self, count: int) -> list[Task]:
        return [self.task(9 * index) for index in range(min(count, self.highest**2 // 9))]

    def task(self, number: int) -> Task:
        cost, worth = divmod(number % self.highest**2, self.highest)
        return Task(id=f"haggle-{number}", messages=[], data={"seller": cost, "buyer": worth + 1})

    async def play(self, task: Task, policy: Policy) -> dict[str, dict[str, float]]:
        """What each role earned, and how often it named a price at all."""
        talks = {role: [self.opening(role, task)] for role in ("seller", "buyer")}
        prices: dict[str, int | None] = {"seller": None, "buyer": None}
        said = {"seller": 0, "buyer": 0}
        try:
            for _ in range(self.rounds):
                for role, other in (("seller", "buyer"), ("buyer", "seller")):
                    turn = await policy.say(talks[role], role=role, max_tokens=4)
                    prices[role] = price_of(turn)
                    said[role] += prices[role] is not None
                    word = f"The other says {prices[role]}." if prices[role] is not None else "The other says nothing."
                    talks[role].append(turn.message)
                    talks[other] = heard(talks[other], word)
                    if (deal := agreed(prices)) is not None:
                        return self.earned(task, deal, said)
        except BudgetError:  # no turns left: scored where it stands
            pass
        return self.earned(task, None, said)

    def opening(self, role: str, task: Task) -> dict[str, str]:
        what = "You sell. It cost you" if role == "seller" else "You buy. It is worth to you"
        return {"role": "user", "content": f"{what} {task.data[role]}. Name a price, as a number."}

    def earned(self, task: Task, deal: int | None, said: dict[str, int]) -> dict[str, dict[str, float]]:
        gains = {"seller": 0.0, "buyer": 0.0}
        if deal is not None:
            gains = {"seller": float(deal - task.data["seller"]), "buyer": float(task.data["buyer"] - deal)}
        return {role: {"gain": gains[role], "spoke": said[role] / self.rounds} for role in said}


def heard(talk: list, word: str) -> list:
    """The conversation with the other's word at its end; words that follow each other are one message."""
    if talk[-1]["role"] == "user":
        return [*talk[:-1], {"role": "user", "content": f"{talk[-1]['content']} {word}"}]
    return [*talk, {"role": "user", "content": word}]


def price_of(turn: Turn) -> int | None:
    digits = "".join(c for c in turn.text if c in "0123456789")[:3]
    return int(digits) if digits else None


def agreed(prices: dict[str, int | None]) -> int | None:
    """The price of the deal: the seller's, once the buyer offers as much."""
    asked, offered = prices["seller"], prices["buyer"]
    return asked if asked is not None and offered is not None and offered >= asked else None


if __name__ == "__main__":
    run = redline.train(
        {
            "run": {"name": "haggle", "steps": 2},
            "model": {"path": "builtin:tiny"},
            "rollouts": {
                "environment": {"name": "haggle:Haggle"},
                "groups_per_step": 2,
                "group_size": 4,
                "max_new_tokens": 4,
                "evaluation": {"num_tasks": 2},
            },
        }
    )
    print(run.path, run.metrics()["rollouts/reward_mean"].to_pylist())
