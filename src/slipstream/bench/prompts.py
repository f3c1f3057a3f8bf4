"""The built-in workload: our own prompts, a few of each kind of work people give a model.

Kinds differ in how much of the answer stands in the prompt, which decides what lookup is worth:
edits copy nearly everything, prose and new code almost nothing, random words forbid guessing.
"""

_FUNCTION = '''def moving_average(values, window):
    """Mean of each run of `window` consecutive values."""
    if window <= 0:
        raise ValueError("window must be positive")
    total = sum(values[:window])
    means = [total / window]
    for i in range(window, len(values)):
        total += values[i] - values[i - window]
        means.append(total / window)
    return means


def report(values):
    for mean in moving_average(values, 7):
        print(f"{mean:.2f}")
'''

_LETTER = """The harbour committee met on Tuesday to decide about the old lighthouse. Repairs to the
lamp and the outer stairs would cost 84,000 crowns, of which the county has promised half. Two
fishermen, Arne Lund and Siri Holm, argued that the light still guides small boats on foggy nights;
the harbour master, Per Dahl, answered that every boat now carries a satellite receiver. In the end
the committee voted five to three to repair the lamp this year and to leave the stairs until the
spring of next year, and it asked Ms Holm to look for donations."""

PROMPTS: tuple[tuple[str, str], ...] = (
    ("prose", "Describe, in one long paragraph, a market square early on a winter morning."),
    ("prose", "Write the opening of a story about a clockmaker who cannot tell the time."),
    (
        "code",
        "Write a Python class for a least-recently-used cache with get, put and a size limit.",
    ),
    ("code", "Write a C function that reverses the order of words in a string in place."),
    ("edit", f"Rename moving_average to rolling_mean and return the whole file:\n\n{_FUNCTION}"),
    ("edit", f"Add type hints to every function and return the whole file:\n\n{_FUNCTION}"),
    ("extraction", f"List every person and sum of money in this text as JSON:\n\n{_LETTER}"),
    ("summary", f"Summarise this in two sentences:\n\n{_LETTER}"),
    (
        "maths",
        "A train leaves at 9:40 and arrives at 13:05, covering 287 km. What is its average "
        "speed? Show every step.",
    ),
    ("maths", "How many three-digit numbers have digits that add up to 5? Explain your counting."),
    ("translation", f"Translate into French:\n\n{_LETTER}"),
    ("non-english", "Erkläre einem Kind in fünf Sätzen, warum der Himmel am Abend rot wird."),
    ("non-english", "¿Qué diferencia hay entre el clima y el tiempo? Responde en un párrafo."),
    (
        "random",
        "Repeat nothing and explain nothing. Write a long list of unrelated random words: "
        "quartz, umbrella, seven, velvet, ontology,",
    ),
)
