r"""The units that may stand behind a number, in one spelling: `m/s`, `square feet`, `MW`, `apples`.

Words behind a number are left out only if they are known here, or if the label has them too. So `5\text{ quadrillion}`,
`5\text{ at most}` and any other words that make another answer are not 5, without a list of such words.
"""

import re

_PREFIXES = ("", *"YZEPTGMkhdcmuµnpf", "da")
_SYMBOLS = re.findall(
    r"\S+", "m g s A K V W J N Pa Hz F C H T S Wb lm lx Bq Gy Sv kat mol cd eV B b L l bar cal rad Wh Ω Da"
)
_SYMBOLS_OF_SI = frozenset(prefix + symbol for prefix in _PREFIXES for symbol in _SYMBOLS)
"""Of these the case counts: a megawatt is no milliwatt."""
_OTHER_SYMBOLS = (
    "ft yd mi lb lbs oz pt qt gal min mins sec secs hr hrs mph kph kmh fps rpm in h d yr yrs deg psi atm "
    "amu au btu usd us "
    "eur gbp kcal kwh mmhg am pm a.m p.m"
)
_NAMES = (
    "meter metre gram second ampere amp kelvin volt watt joule newton pascal hertz farad coulomb henry "
    "tesla siemens weber lumen lux "
    "becquerel gray sievert mole candela electronvolt byte bit liter litre bar calorie tonne ton radian steradian ohm parsec"
)
_LONG_PREFIXES = ("", "kilo", "mega", "giga", "tera", "milli", "micro", "nano", "pico", "centi", "deci", "hecto")
_OTHER_NAMES = (
    "inch inches foot feet yard mile pound ounce gallon quart pint cup tablespoon teaspoon acre hectare "
    "minute hour day week month "
    "year decade century centuries dollar cent euro rupee yen peso franc penny pennies nickel dime coin bill "
    "degree celsius fahrenheit unit square cubic per knot horsepower "
)
_THINGS = (
    "person people student pupil child children boy girl man men woman women adult kid player team "
    "teacher worker member friend "
    "family families apple orange banana pear peach lemon mango cherry cherries berry berries strawberry "
    "strawberries cookie cake "
    "pie pizza slice piece egg candy candies chocolate sandwich sandwiches sweet cupcake muffin donut potato potatoes tomato "
    "tomatoes vegetable fruit flower rose plant tree leaf leaves seed cow horse pig sheep goat chicken "
    "duck hen dog cat fish bird "
    "rabbit mouse mice bee animal book page word letter chapter pencil pen crayon marker eraser notebook "
    "paper card stamp sticker "
    "marble ball balloon toy doll game puzzle box boxes bag basket bottle can jar container carton pack bus buses car truck "
    "bike bicycle train plane boat ship wheel ticket seat chair table desk room house door window floor "
    "shirt sock shoe hat dress "
    "dresses point way time step move turn trip lap race round goal vote question problem answer "
    "solution digit number integer "
    "prime divisor factor term element subset set function root arrangement permutation combination path route triangle "
    "rectangle circle edge side vertex vertices face line angle diagonal region cube tile block brick stone bead shell song "
    "video photo picture message call email visitor guest customer employee passenger vehicle machine "
    "robot job task class classes "
    "lesson course grade test quiz quizzes pound serving meal drink glass glasses"
)
_ADJECTIVES = "different distinct possible total us red blue green yellow white black"


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\S+", text))


def _with_plurals(words: frozenset[str]) -> frozenset[str]:
    return words | {f"{word}s" for word in words}


_KNOWN = (
    _words(_OTHER_SYMBOLS)
    | _with_plurals(_words(_OTHER_NAMES) | _words(_THINGS))
    | _with_plurals(frozenset(prefix + name for prefix in _LONG_PREFIXES for name in _words(_NAMES)))
    | _words(_ADJECTIVES)
    | {"°", "°C", "°F", "%", "$"}
)
_POWER = re.compile(r"\^[23]\Z")
_DOLLARS = frozenset(("$", "dollar", "dollars", "usd", "us dollars"))


def one_spelling(word: str) -> str:
    """A word of a unit without capitals, if these mean nothing: `meters` for `Meters`, but `MW` and "
    "`mW`. A liter is `l` and `L`."""
    name, power = _POWER.sub("", word), "".join(_POWER.findall(word))
    if name.lstrip("°") not in _SYMBOLS_OF_SI:
        return word.casefold() if len(name) > 1 and not name.startswith("°") else word
    is_liter = name[-1:] == "L" and name[:-1] in _PREFIXES
    return (f"{name[:-1]}l" if is_liter else name) + power


def is_known(unit: str) -> bool:
    """Whether each word of a unit is known."""
    names = [_POWER.sub("", word) for word in re.split("[ /]", unit)]
    return all(name in _KNOWN or name.lstrip("°") in _SYMBOLS_OF_SI for name in names)


def units_agree(unit: str, unit_of_label: str) -> bool:
    """Whether an answer in one unit may equal a label in another. An answer may lack the unit of its label, and have a known
    unit where the label has none; but 3 is not 3%, and `\\$3` is 3 dollars, not 3 cents."""
    if unit in _DOLLARS or unit_of_label in _DOLLARS:
        unit, unit_of_label = ("$" if text in _DOLLARS else text for text in (unit, unit_of_label))
    if unit == unit_of_label:
        return True
    if "%" in (unit, unit_of_label):
        return False
    return unit == "" or (unit_of_label == "" and is_known(unit))
