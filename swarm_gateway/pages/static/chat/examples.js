// Example prompts for a new conversation.

const CHAT = [
  ["Explain", "Explain how a language model can run on several machines at once."],
  ["Write code", "Write a Python function that merges two sorted lists, with a test."],
  ["Rewrite", "Rewrite this more plainly: we endeavour to facilitate the utilisation of our services."],
  ["Compare", "Compare TCP and UDP in a table: order, losses, and what each is used for."],
];
const COMPLETE = [
  ["A list", "Three things that every engineer should know:\n\n1."],
  ["A story", "The lighthouse had been dark for years when"],
  ["A function", "def is_prime(number: int) -> bool:\n    "],
  ["A letter", "Dear neighbours,\n\n"],
];
const PYTHON_DOCS = [
  ["A method", "Return a list of"],
  ["A class", "class Queue(object)\n |  Create a queue object with"],
  ["A statement", "The with statement\n******************\n\nThe with statement is used to"],
  ["An exception", "exception TimeoutError\n\n   Raised when"],
];

/** Return pairs of a title and a text. */
export function examplesFor(model, isComplete) {
  if (!isComplete) return CHAT;
  return model?.startsWith("tiny-python-docs") ? PYTHON_DOCS : COMPLETE;
}
