"""Training of draft heads, on the target's own answers.

    prompts      what is asked: tasks and subjects of ours, questions the target makes up, files
    texts        the target's answers, on disk
    states       what the target's layers made of them, on disk
    rows         packed rows of both, in an order that is a function of seed and step
    start        a head before its first step: passing features through
    unroll       a head drafting on its own output, as it will have to
    objectives   losses of the published recipes
    loop         steps, checkpoints, held-out acceptance
    run          all of it, in a directory it can be taken up in again

Everything is a function of the settings: a run that was killed goes on where it stopped and ends
where it would have ended.
"""
