// Loaded before the page is drawn, so that it never shows in the other theme first.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("swarm.theme");
  } catch {
    // storage is switched off: the system's theme
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
