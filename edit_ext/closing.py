"""flush(): syncs until every replica has said that it is done, however many steps each has made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine


def flush(engine: Engine) -> None:
    """See `Handle.flush`. What is in flight lands first.

    A replica that is done takes part in whatever its peers sync next, with weight zero, until all
    are done; where that was a part of the model, one more sync closes all windows.
    """
    syncs, clock = engine.syncs, engine.clock
    again = syncs.active and syncs.said_done  # a flush that Ctrl-C broke off
    syncs.finish()
    if again and syncs.of_all and syncs.all_done():
        _over(engine)
        return
    if engine.averager is not None:
        engine.averager.join()
    if clock.warming_up:
        return
    engine.switch_if_due()
    if not engine.recipe.overtakes:
        syncs.land_all()
    if engine.alarm is not None:
        engine.alarm.settle()
        engine.alarm.ask()
    done = False
    while not (done and syncs.of_all):
        if done or len(engine.recipe.tracks) == 1:
            clock.arm()
        else:
            clock.arm_next()
        syncs.start(done=True)
        syncs.finish()
        syncs.land_all()
        done = syncs.all_done() or done
        if engine.alarm is not None and not done:
            engine.alarm.wait()  # else the others would sync at every step
    _over(engine)


def _over(engine: Engine) -> None:
    engine.syncs.land_all()
    engine.clock.begin_again()
