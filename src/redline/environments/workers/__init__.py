"""Where an environment's blocking code runs, for coroutines that must not block: in the loop itself, in threads, in processes.

    game = await workers.make(GameClass("my_game:Game", {"seed": 0}))      a game lives where it was made
    reaction = await game.call("step", "up")                               ┄► thread, or process ┄►  its value, or its error
    game.drop()                                                            does not block

    run_in       a call that does not return           a crash of the interpreter      what a call costs
    loop         blocks everything                     ends the run                    3 µs
    threads      leaves its thread behind              ends the run                    0.2 ms
    processes    is killed with its process, and       fails the games of that         0.9 ms
                 all games that lived in it fail       process, which is replaced

Calls wait in queues that hold one call for each attempt at most, since an attempt awaits each of its calls. A coroutine that is
cancelled takes back the call that it waits for, where that has not begun. Any thread's event loop may use the same workers.
"""
